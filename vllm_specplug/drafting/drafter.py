# SPDX-License-Identifier: Apache-2.0
"""What the author of a drafting method implements, and what it is given at start.

A drafter knows nothing of vLLM. The runtime hands it the target's weights it shares, a cache
for its context keys and values that lives in vLLM's pages, and per step the hidden states of
newly committed tokens and the requests to draft for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from vllm_specplug.drafting.abilities import (
    DeferredContext,
    GraphCapture,
    LevelPasses,
    Lookup,
    OnDeviceDrafting,
    OwnWindow,
    SelfDraft,
)
from vllm_specplug.drafting.caches import DraftCache, DraftCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.drafting.target_head import TargetHead
from vllm_specplug.tree import DraftTree

if TYPE_CHECKING:
    # Declarations of methods import this file where torch would only cost start-up.
    import torch


class LinearFactory(Protocol):
    """Makes matrix products in the device's fastest form."""

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """x [T, in] -> [T, out] for weight [out, in] and bias [out] or None."""


@dataclass(frozen=True)
class DrafterOptions:
    """The options a drafter reads, resolved."""

    head_path: str | None
    num_nodes: int
    """Node budget of one tree, root excluded."""
    tree_depth: int
    """Deepest node the head drafts."""
    max_depth: int
    """Deepest node of a tree, from whatever source."""
    tree_width: int
    ngram_topk: int
    """Most n-gram branches of a tree, or children of a node that the text proposes; 0: none."""
    max_model_len: int
    settings: Any = None
    """The method's own options, as its `DraftPlan` has them."""
    vocab_size: int = 1 << 31
    """Tokens of the target. Prompts may hold others, which are no drafts."""


@dataclass(frozen=True)
class TargetWeights:
    """What a head shares with its target."""

    # [V, H]
    embed_tokens: torch.Tensor
    # [V, H]
    lm_head: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    text_config: object
    """The target's Hugging Face text config."""
    make_linear: LinearFactory
    """Makes a matrix product from weight [out, in] and bias [out] or None, packed for the
    device."""
    heads: list[TargetHead] = field(default_factory=list)
    """Those that `make_lm_head` made of the target's own rows."""

    def make_lm_head(
        self, target_ids: torch.Tensor | None, own: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Scores over a draft vocabulary: [T, H] -> [T, V'].

        Args:
            target_ids: int64 [V'], the target token of each draft id; None for the whole
                vocabulary.
            own: [V', H] of a head that ships its LM head; None takes the target's rows.
        """
        if own is not None:
            weight = own.to(device=self.device, dtype=self.dtype).contiguous()
            return self.make_linear(weight, None)
        head = TargetHead(self.lm_head, target_ids, self.device, self.dtype, self.make_linear)
        self.heads.append(head)
        return head


class Drafter(
    DeferredContext, Lookup, LevelPasses, OwnWindow, SelfDraft, OnDeviceDrafting, GraphCapture, ABC
):
    """One drafting method.

    Order of calls: `load`, then every step `observe` with what was committed and, when
    a request is to be drafted for, `propose`. What else a drafter may do is in `abilities`.
    """

    reads_target_weights: ClassVar[bool] = True
    """Whether `load` reads the target's embedding and LM head; else it gets empty tensors."""

    def __init__(self, options: DrafterOptions) -> None:
        self.options = options

    @abstractmethod
    def load(self, target: TargetWeights) -> None:
        """Loads the draft checkpoint and what it shares with the target.

        Raises:
            ValueError: when the checkpoint is not for this target, or is incomplete.
        """

    def follow_target(self, target: TargetWeights) -> None:
        """Renews, in place, what `load` computed from weights of the target, which have changed.
        The embedding and the LM heads that `load` was given have followed already."""

    def cache_specs(self) -> list[DraftCacheSpec]:
        """The caches that must live in vLLM's pages, one per draft layer; none by default."""
        return []

    def bind_cache(self, cache: DraftCache) -> None:
        """Gives the drafter its pages, once they exist."""
        self.cache = cache

    @abstractmethod
    def observe(self, committed: CommittedTokens) -> None:
        """Takes in newly committed tokens, drafting or not. Called every step; see
        `DeferredContext.observes_late`."""

    @property
    def forward_depth(self) -> int:
        """Deepest node a draft forward gives. 0: there is no forward, or `propose` does not heed
        `forward_depths`; it is then called in every step, but where lookups rest."""
        return 0

    @abstractmethod
    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        """One tree per request, within its budget, width and depth."""

    @property
    def warmup_depth(self) -> int:
        """Deepest node of the drafts that are made once at start, on a device: to compile kernels,
        and for vLLM's memory profile."""
        return self.forward_depth

    def warmup(self, requests: DraftRequests) -> None:
        """Drafts for dummy requests as deep as their depths say, from every source."""
        self.propose(requests)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops what is kept for requests that ended; nothing by default."""
