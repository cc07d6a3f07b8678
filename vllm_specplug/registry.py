# SPDX-License-Identifier: Apache-2.0
"""The methods by name, and where their drafters live."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MethodInfo:
    """What the rest of the project needs to know of a method before importing it."""

    name: str
    drafter: str
    """Dotted path of the drafter class, imported only in the worker."""
    needs_head: bool
    """Whether `model` must name a draft checkpoint."""
    default_ngram_topk: int
    """N-gram branches merged into a tree where the user did not say."""
    summary: str
    uses_local_head: bool = False
    """Whether `local_head` names a second head that is fused with the first."""
    drafts_by_level: bool = False
    """Whether the head is a LongSpec layer, run once a level, instead of a block head."""
    self_drafts: bool = False
    """Whether the target drafts for itself, with TokenSwift heads on its last layer."""

    @property
    def runs_on_cuda(self) -> bool:
        """Whether its drafter works on CUDA. Those with caches of their own, or whose trees
        depend on the branch, read CPU memory."""
        return not (self.uses_local_head or self.drafts_by_level or self.self_drafts)


_METHODS = {
    info.name: info
    for info in (
        MethodInfo(
            name="jetspec",
            drafter="vllm_specplug.methods.jetspec.drafter.JetSpecDrafter",
            needs_head=True,
            default_ngram_topk=3,
            summary="causal block head over target features, tree by best-first expansion",
        ),
        MethodInfo(
            name="ddtree",
            drafter="vllm_specplug.methods.ddtree.drafter.DDTreeDrafter",
            needs_head=True,
            default_ngram_topk=3,
            summary="bidirectional block head (DFlash) over target features, tree or chain",
        ),
        MethodInfo(
            name="dels",
            drafter="vllm_specplug.methods.dels.drafter.DelsDrafter",
            needs_head=True,
            default_ngram_topk=3,
            summary="DFlash head fused with a short-context local head, branch by branch",
            uses_local_head=True,
        ),
        MethodInfo(
            name="longspec",
            drafter="vllm_specplug.methods.longspec.drafter.LongSpecDrafter",
            needs_head=True,
            default_ngram_topk=3,
            summary="one layer over a window and the target's own cache, level by level",
            drafts_by_level=True,
        ),
        MethodInfo(
            name="tokenswift",
            drafter="vllm_specplug.methods.tokenswift.drafter.TokenSwiftDrafter",
            needs_head=True,
            default_ngram_topk=3,
            summary="the target over a partial cache, chained heads and n-grams, for long outputs",
            self_drafts=True,
        ),
        MethodInfo(
            name="ngram_tree",
            drafter="vllm_specplug.drafting.ngram.NgramTreeDrafter",
            needs_head=False,
            default_ngram_topk=3,
            summary="branches looked up in the request's own tokens, merged into one tree",
        ),
    )
}

METHOD_NAMES: tuple[str, ...] = tuple(_METHODS)


def get_method(name: str) -> MethodInfo:
    """The method called `name`.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    try:
        return _METHODS[name]
    except KeyError:
        raise ValueError(
            f"method={name!r} is not one of this plugin's methods; known: {', '.join(METHOD_NAMES)}"
        ) from None


def load_drafter_class(name: str) -> type[Any]:
    """Imports and returns the drafter class of the method called `name`."""
    module, _, attribute = get_method(name).drafter.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
