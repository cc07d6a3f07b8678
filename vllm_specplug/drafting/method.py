# SPDX-License-Identifier: Apache-2.0
"""What a method declares before anything starts: its options, its needs, where its drafter is.

Nothing in this file imports vLLM or torch, and importing a method's declaration may not either:
the API server reads it before it knows a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_specplug.options import is_number, option_error, value_error

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter
    from vllm_specplug.drafting.head_files import HeadFiles

API_VERSION = 1
"""Version of the contract between methods and this package. It grows when something that a method
may rely on changes its meaning; additions leave it alone."""


class Capability(StrEnum):
    """What a drafter may need of the runner it drafts for. An adapter satisfies each, or refuses
    the method by naming it."""

    HIDDEN_STATES = "hidden_states"
    """Outputs of chosen decoder layers for every committed token (`DraftPlan.hidden_layers`)."""
    OUTPUT_STATES = "output_states"
    """What the target's forward returns for every committed token, from which its LM head's scores
    are computed (`CommittedTokens.output_states`)."""
    NEXT_TOKENS = "next_tokens"
    """The token after every committed one (`CommittedTokens.next_token_ids`). The last block of a
    prefix hit is computed again: another token may follow it than when it was cached."""
    CONTEXT_CACHE = "context_cache"
    """Keys and values of draft layers in vLLM's pages (`Drafter.cache_specs`)."""
    CONTEXT_WINDOW = "context_window"
    """Draft layers that only see the last tokens of that context (`DraftCacheSpec.window`)."""
    WINDOW = "window"
    """Keys and values of each request's last tokens, in memory of constant size
    (`Drafter.window_spec`)."""
    TARGET_CACHE = "target_cache"
    """Attention over what the target's last layer has cached; comes with `WINDOW`."""
    TARGET_FORWARD = "target_forward"
    """The target's own layers over a partial cache (`Drafter.partial_cache_spec`)."""
    HOST_BRANCHES = "host_branches"
    """Trees made on the host level by level, with a read of what each level scored; a device gives
    level-by-level drafters `DeviceCache.tree_attention`, or the calls of `DeviceWindow` and
    `DeviceTargetCache`, in its place."""


class SharedOptions(Protocol):
    """The options that every method has; those of `options.TreeOptions`, and vLLM's own."""

    model: str | None
    num_speculative_tokens: int
    tree_depth: int | None
    tree_width: int
    ngram_topk: int


@dataclass(frozen=True)
class TargetInfo:
    """What is known of the target before it is loaded."""

    text_config: Any
    """Its Hugging Face text config."""
    max_model_len: int
    model_config: Any
    """vLLM's config of the model."""


@dataclass(frozen=True)
class DraftPlan:
    """What a method makes of its options and its head's config, before anything is loaded."""

    depth: int
    """Deepest node that the method drafts itself, lookups aside."""
    head_path: str | None = None
    """Folder of the draft checkpoint."""
    hidden_layers: tuple[int, ...] = ()
    """Decoder layers of the target, from 0, whose outputs `Drafter.observe` is given."""
    target_forward_option: str | None = None
    """The option and its value, for messages, where drafts take forwards of the target itself."""
    needs: frozenset[Capability] = frozenset()
    """What this head needs beside what its method does."""
    settings: Any = None
    """The method's own options, resolved: `DrafterOptions.settings` of its drafter. Is pickled."""


class MethodOptions(BaseModel):
    """Options that only one method has, as keys of `--speculative-config`.

    Subclass it in the method's folder. The string below each field is its documentation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        """Checks all options together, and against the head and the target.

        Args:
            method: the method's name, for messages.

        Raises:
            ValueError: naming the option, its value, what is legal and what to do
                (`option_error`).
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Method:
    """A method by name. Dotted paths ("package.module:Name") are imported when they are needed."""

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
    """Path of a function that takes `HeadFiles` and says whether the checkpoint is a head of this
    method, for users who only name the head. It need not say whether the head can be served:
    `resolve` does. None: a head is never taken for one of this method's."""
    train_commands: tuple[str, ...] = ()
    """Modules with `register(train_app, data_app)`, which add commands to `specplug train` and
    `specplug data`."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options that `specplug config TARGET METHOD` prints, by target. Values "heads/NAME" are
    shipped folders."""
    is_default: bool = False
    """Whether demo and benchmarks take it where no method was named."""
    api_version: int = API_VERSION

    def load_options(self) -> type[MethodOptions]:
        """Imports the class of its own options."""
        return _load(self.options)

    def load_drafter(self) -> type[Drafter]:
        """Imports the class of its drafter."""
        return _load(self.drafter)

    def recognises_head(self, head: HeadFiles) -> bool:
        """Whether a checkpoint is a head of this method, judged by its files."""
        return self.recognises is not None and bool(_load(self.recognises)(head))

    def option_names(self) -> tuple[str, ...]:
        """Names of its own options."""
        return tuple(self.load_options().model_fields)

    def parse_options(self, values: Mapping[str, Any]) -> MethodOptions:
        """Its own options from what the user gave for them.

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
            made = kind(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else self.name
            if name not in values or first["type"] == "value_error":
                raise option_error(
                    name,
                    first.get("input"),
                    first["msg"].removeprefix("Value error, "),
                    f"`specplug options {self.name}` lists what is legal",
                ) from None
            wrong.append(name)
        if not wrong:
            return made
        field = kind.model_fields[wrong[0]]
        raise value_error(
            wrong[0], values[wrong[0]], field.annotation, field.metadata, field.default
        )


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
