# SPDX-License-Identifier: Apache-2.0
"""The base class of drafters, and what a drafter receives at start.

A drafter knows nothing about vLLM. The runtime gives it the target's weights that it shares, a
cache in vLLM's pages for its context keys and values, and in every step the hidden states of newly
committed tokens and the requests to draft for.
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
    TargetCaches,
)
from vllm_specplug.drafting.caches import DraftCache, DraftCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.drafting.target_head import TargetHead
from vllm_specplug.tree import DraftTree

if TYPE_CHECKING:
    # Declarations of methods import this file in processes that do not need torch.
    import torch


class LinearFactory(Protocol):
    """Builds matrix products in the device's fastest form."""

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """x [T, in] -> [T, out] for weight [out, in] and bias [out] or None."""


class ExpertProducts(Protocol):
    """Multiplies rows with the experts of an MLP; see `kernels.multiply_experts`."""

    def __call__(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        expert_ids: torch.Tensor,
    ) -> torch.Tensor:
        """[T, H], [E, 2I, H], [E, H, I], float32 [T, K] and integers [T, K] -> [T, H]."""


@dataclass(frozen=True)
class DrafterOptions:
    """The resolved options of a drafter."""

    head_path: str | None
    num_nodes: int
    """Node budget of one tree, excluding the root."""
    tree_depth: int
    """Maximum depth that the head drafts."""
    max_depth: int
    """Maximum depth of a tree from any source."""
    tree_width: int
    ngram_topk: int
    """Maximum n-gram branches per tree, or n-gram children per node; 0 for none."""
    max_model_len: int
    settings: Any = None
    """The method's own options (`DraftPlan.settings`)."""
    vocab_size: int = 1 << 31
    """Size of the target's vocabulary. Prompts may hold other tokens, which are never drafted."""


@dataclass(frozen=True)
class TargetWeights:
    """The target's weights that a head shares."""

    # [V, H]
    embed_tokens: torch.Tensor
    # [V, H]
    lm_head: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    text_config: object
    """The target's Hugging Face text config."""
    make_linear: LinearFactory
    multiply_experts: ExpertProducts
    heads: list[TargetHead] = field(default_factory=list)
    """The heads that `make_lm_head` built from the target's rows."""

    def make_lm_head(
        self, target_ids: torch.Tensor | None, own: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns an LM head over a draft vocabulary: [T, H] -> [T, V'].

        Args:
            target_ids: int64 [V'], the target token of each draft id; None for the full
                vocabulary.
            own: [V', H] for a head that ships its LM head; None uses the target's rows.
        """
        if own is not None:
            weight = own.to(device=self.device, dtype=self.dtype).contiguous()
            return self.make_linear(weight, None)
        head = TargetHead(self.lm_head, target_ids, self.device, self.dtype, self.make_linear)
        self.heads.append(head)
        return head


class Drafter(
    DeferredContext,
    Lookup,
    LevelPasses,
    OwnWindow,
    TargetCaches,
    SelfDraft,
    OnDeviceDrafting,
    GraphCapture,
    ABC,
):
    """One drafting method.

    Order of calls: `load`; then in every step `observe` with the committed tokens and, if any
    request is drafted for, `propose`. The mixins of `abilities` are optional.
    """

    reads_target_weights: ClassVar[bool] = True
    """Whether `load` reads the target's embedding and LM head; if not, it gets empty tensors."""

    attends_context: bool = False
    """Whether `observe` attends the cached context and needs `CommittedTokens.table_rows`."""

    def __init__(self, options: DrafterOptions) -> None:
        self.options = options

    @abstractmethod
    def load(self, target: TargetWeights) -> None:
        """Loads the draft checkpoint and takes what it shares with the target.

        Raises:
            ValueError: if the checkpoint is not for this target, or is incomplete.
        """

    def follow_target(self, target: TargetWeights) -> None:
        """Recomputes in place what `load` derived from target weights that have changed.

        The embedding and the LM heads that `load` received are already updated.
        """

    def cache_specs(self) -> list[DraftCacheSpec]:
        """Returns the caches to keep in vLLM's pages, one per draft layer; none by default."""
        return []

    def bind_cache(self, cache: DraftCache) -> None:
        """Gives the drafter its pages, once they exist."""
        self.cache = cache

    @abstractmethod
    def observe(self, committed: CommittedTokens) -> None:
        """Records newly committed tokens. Called in every step."""

    @property
    def forward_depth(self) -> int:
        """Maximum depth that a draft forward returns.

        0 if there is no forward, or if `propose` ignores `forward_depths`. It is then called in
        every step, except while lookups are skipped.
        """
        return 0

    @abstractmethod
    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        """Returns one tree per request, within its budget, width and depth."""

    @property
    def warmup_depth(self) -> int:
        """Depth of the drafts that are made once at start on a device, to compile kernels and for
        vLLM's memory profile."""
        return self.forward_depth

    def warmup(self, requests: DraftRequests | DeviceRequests) -> None:
        """Drafts for dummy requests to their full depths, from every source."""
        if isinstance(requests, DeviceRequests):
            self.propose_on_device(requests)
        else:
            self.propose(requests)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops the state of requests that ended or were preempted; nothing by default."""
