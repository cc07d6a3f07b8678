# SPDX-License-Identifier: Apache-2.0
"""The declaration of a method: its options, its needs, and the path of its drafter.

This module imports neither vLLM nor torch, and the declaration of a method must not either, because
the API server reads it before a device is known.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_specplug.options import is_number, option_error, value_error

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter, DrafterOptions
    from vllm_specplug.drafting.head_files import HeadFiles

API_VERSION = 1
"""Version of the contract between methods and this package. It increases if something that methods
may rely on changes its meaning, but not for additions."""


class Capability(StrEnum):
    """What a drafter may need from its runner."""

    HIDDEN_STATES = "hidden_states"
    """Outputs of chosen decoder layers for every committed token (`DraftPlan.hidden_layers`)."""
    OUTPUT_STATES = "output_states"
    """The output of the target's forward for every committed token, from which its LM head computes
    scores (`CommittedTokens.output_states`)."""
    NEXT_TOKENS = "next_tokens"
    """The token after every committed one (`CommittedTokens.next_token_ids`). The last block of a
    prefix hit is recomputed, because its next token may differ from the cached one's."""
    CONTEXT_CACHE = "context_cache"
    """Keys and values of draft layers in vLLM's pages (`Drafter.cache_specs`)."""
    CONTEXT_WINDOW = "context_window"
    """Draft layers that attend only the last tokens of that context (`DraftCacheSpec.window`)."""
    WINDOW = "window"
    """Keys and values of each request's last tokens, in memory of constant size
    (`Drafter.window_spec`)."""
    TARGET_CACHE = "target_cache"
    """Attention over caches of the target's own layers (`Drafter.target_cache_specs`)."""
    TARGET_FORWARD = "target_forward"
    """The target's own layers over a partial cache (`Drafter.partial_cache_spec`)."""


class SharedOptions(Protocol):
    """Options of all methods: `options.TreeOptions` and vLLM's own."""

    model: str | None
    num_speculative_tokens: int
    tree_depth: int | None
    tree_width: int
    ngram_topk: int


@dataclass(frozen=True)
class TargetInfo:
    """What is known about the target before it is loaded."""

    text_config: Any
    """Its Hugging Face text config."""
    max_model_len: int
    model_config: Any
    """vLLM's config of the model."""


@dataclass(frozen=True)
class DraftPlan:
    """The resolved options and head config of a method, before anything is loaded."""

    depth: int
    """Maximum depth that the method drafts without lookups."""
    head_path: str | None = None
    """Folder of the draft checkpoint."""
    hidden_layers: tuple[int, ...] = ()
    """Decoder layers of the target, from 0, whose outputs `Drafter.observe` receives."""
    target_forward_option: str | None = None
    """The option, with its value, that makes drafts run the target itself; used in messages."""
    needs: frozenset[Capability] = frozenset()
    """What this head needs in addition to its method's needs."""
    settings: Any = None
    """The method's own resolved options (`DrafterOptions.settings`). They are pickled."""
    drafter: str | None = None
    """Path of the drafter for heads of this kind; None for `Method.drafter`."""


class MethodOptions(BaseModel):
    """Options that only one method has, as keys of `--speculative-config`.

    Subclass it in the method's folder. The string below each field is its documentation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        """Checks the options against each other, the head and the target.

        Args:
            method: the method's name, for messages.

        Raises:
            ValueError: naming the option, its value, what is legal and what to do
                (`option_error`).
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Method:
    """A method. Paths have the form "package.module:Name" and are imported when needed."""

    name: str
    summary: str
    """One line for tables and `--help`."""
    options: str
    """Path of its subclass of `MethodOptions`."""
    drafter: str
    """Path of its subclass of `Drafter`; imported in workers only."""
    needs: frozenset[Capability] = frozenset()
    needs_head: bool = True
    """Whether `model` must name a draft checkpoint."""
    recognises: str | None = None
    """Path of a function that takes `HeadFiles` and returns whether the checkpoint is a head of
    this method, for users who name only the head. `resolve` checks whether it can be served. None
    if no head belongs to this method."""
    train_commands: tuple[str, ...] = ()
    """Modules with a function `register(train_app, data_app)` that adds commands to
    `specplug train` and `specplug data`."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options that `specplug config TARGET METHOD` prints, by target. A value "heads/NAME" is a
    shipped folder."""
    is_default: bool = False
    """Whether the demo and the benchmarks use it by default."""
    api_version: int = 1
    """Version of the contract that the method is written for. The default is a number, not
    `API_VERSION`, so that a later version of this package refuses methods that do not name it."""

    def load_options(self) -> type[MethodOptions]:
        """Imports the class of the method's own options."""
        return _load(self.options)

    def load_drafter(self, plan: DraftPlan | None = None) -> Callable[[DrafterOptions], Drafter]:
        """Imports the class of the drafter, which `plan` may choose."""
        return _load(plan.drafter if plan and plan.drafter else self.drafter)

    def recognises_head(self, head: HeadFiles) -> bool:
        """Whether a checkpoint is a head of this method, according to its files."""
        return self.recognises is not None and bool(_load(self.recognises)(head))

    def option_names(self) -> tuple[str, ...]:
        """Returns the names of the method's own options."""
        return tuple(self.load_options().model_fields)

    def parse_options(self, values: Mapping[str, Any]) -> MethodOptions:
        """Returns the method's own options from the user's values.

        Raises:
            ValueError: for the first value of a wrong type or out of range.
        """
        kind = self.load_options()
        wrong = [
            name
            for name, value in values.items()
            if isinstance(value, bool) and is_number(kind.model_fields[name].annotation)
        ]
        try:
            options = kind(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else self.name
            if name not in values or first["type"] == "value_error":
                raise option_error(
                    name,
                    first.get("input"),
                    first["msg"].removeprefix("Value error, "),
                    f"`specplug options {self.name}` lists the legal values",
                ) from None
            wrong.append(name)
        if not wrong:
            return options
        field = kind.model_fields[wrong[0]]
        raise value_error(
            wrong[0], values[wrong[0]], field.annotation, field.metadata, field.default
        )


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
