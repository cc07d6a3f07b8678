# SPDX-License-Identifier: Apache-2.0
"""What a drafter is given and what it must return.

A drafter knows nothing of vLLM. The runtime hands it the target's weights it shares, a cache
for its context keys and values that lives in vLLM's pages, and per step the hidden states of
newly committed tokens and the requests to draft for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from vllm_specplug.drafting.committed_tokens import CommittedTokens as CommittedTokens
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.target_head import TargetHead
from vllm_specplug.options import TreeBuilderName
from vllm_specplug.tree import DraftTree

if TYPE_CHECKING:
    # Declarations of methods import this file where torch would only cost start-up.
    import torch

    from vllm_specplug.drafting.ngram import NgramBranches


class LinearFactory(Protocol):
    """Makes matrix products in the device's fastest form."""

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """x [T, in] -> [T, out] for weight [out, in] and bias [out] or None."""


def device_tensor(
    values: Sequence[Any] | np.ndarray[Any, Any], device: torch.device
) -> torch.Tensor:
    """Integers of the host as int64 on `device`, without waiting for it."""
    from vllm_specplug.kernels import to_device

    return to_device(np.array(values, dtype=np.int64), device)


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
    tree_builder: TreeBuilderName
    hybrid_lambda: float
    ngram_topk: int
    """Most n-gram branches of a tree, or children of a node that the text proposes; 0: none."""
    max_model_len: int
    settings: Any = None
    """The method's own options, as its `DraftPlan` has them."""
    ngram_size: int = 4
    """Longest suffix that n-gram branches look up."""
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


# Of the names of draft layers among vLLM's.
DRAFT_LAYERS = "specplug.draft.layers"


@dataclass(frozen=True)
class DraftCacheSpec:
    """Shape of one draft layer's context cache."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window: a row at position p sees positions p - window + 1 to p. None: all."""


@dataclass(frozen=True)
class DraftPenalty:
    """What the target's sampler will do to the logits of some tokens, for drafts to do the same."""

    # [n] int64, distinct
    token_ids: torch.Tensor
    apply: Callable[[torch.Tensor, torch.Tensor], None]
    """Takes logits [..., V] and the indices int64 [n] of these tokens in them; works in place."""


@dataclass(frozen=True)
class DraftRequests:
    """The requests to draft for in this step; R of them."""

    # [R]
    req_ids: list[str] = field(default_factory=list)
    # [R] committed tokens of each, the anchor last; views that are valid during the call only
    token_ids: list[np.ndarray] = field(default_factory=list)
    # [R] committed tokens before the anchor, which is also the anchor's position
    context_lens: list[int] = field(default_factory=list)
    # [R] row of each request in the block table
    req_indices: list[int] = field(default_factory=list)
    # [R] most nodes of each tree
    budgets: list[int] = field(default_factory=list)
    # [R] most children of a node; 1 asks for a chain
    widths: list[int] = field(default_factory=list)
    # [R] deepest node worth drafting
    depths: list[int] = field(default_factory=list)
    # [R] deepest node worth a draft forward; 0 leaves the request to lookups that cost nothing.
    # Empty: the same as `depths`
    forward_depths: list[int] = field(default_factory=list)
    # [R] the contextual penalty of each, None where it has none. Empty: no request has one
    penalties: list[DraftPenalty | None] = field(default_factory=list)
    min_node_prob: float = 0.0
    """Drafts by levels made on the host: least probability, as the head has it, of a node that gets
    children."""
    min_level_prob: float = 0.0
    """Likewise: least sum of these over a level, of all requests, for another level."""

    @property
    def anchors(self) -> list[int]:
        """[R] the last committed token of each: root of its tree, not in the target's cache yet."""
        return [int(tokens[-1]) for tokens in self.token_ids]

    def __len__(self) -> int:
        return len(self.token_ids)

    def for_forward(self) -> tuple[list[int], DraftRequests]:
        """The requests that want a draft forward, and which of the R they are."""
        if not self.forward_depths:
            return list(range(len(self))), self
        chosen = [r for r, depth in enumerate(self.forward_depths) if depth > 0]
        columns = {
            name: [values[r] for r in chosen]
            for name, values in vars(self).items()
            if isinstance(values, list) and name not in ("depths", "forward_depths") and values
        }
        return chosen, DraftRequests(
            **columns,
            depths=[self.forward_depths[r] for r in chosen],
            min_node_prob=self.min_node_prob,
            min_level_prob=self.min_level_prob,
        )


class DraftCache(Protocol):
    """Context keys and values of the draft layers in vLLM's paged cache."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [num_layers, M, Hkv, Dh] of committed tokens at `slots` [M]."""

    def block_attention(
        self, requests: DraftRequests, rows: int, causal: bool | Sequence[bool]
    ) -> BlockAttention:
        """Attention of `rows` block rows per request over its paged context and the block.

        Args:
            causal: the mask inside the block, of all layers or of each.
        """


class HostCache(DraftCache, Protocol):
    """The cache where it is in the host's own memory."""

    def slots(self, req_index: int, num_tokens: int) -> np.ndarray:
        """int64 [num_tokens], the slots of a request's first tokens; `req_index` is its place in
        the batch."""


class DeviceCache(DraftCache, Protocol):
    """The cache on devices that can draft without the host (`Drafter.drafts_on_device`)."""

    def block_attention(
        self, requests: DraftRequests | DeviceRequests, rows: int, causal: bool | Sequence[bool]
    ) -> BlockAttention:
        """See `DraftCache`."""

    def tree_attention(
        self,
        requests: DraftRequests | DeviceRequests,
        context_lens: torch.Tensor,
        parent_rows: torch.Tensor,
    ) -> BlockAttention:
        """Attention of tree rows over the first `context_lens` [R] slots and their own branch.

        Args:
            parent_rows: int32 [R, rows], of each request's rows the row of its parent; -1 for its
                first, which is the root.
        """


class BranchCache(DraftCache, Protocol):
    """The cache where trees are made on the host."""

    def branch_attention(
        self, requests: DraftRequests, context_lens: Sequence[int], parents: list[np.ndarray]
    ) -> BlockAttention:
        """Attention of tree rows over the first `context_lens` [R] slots and their own branch.

        The rows of each request lie together; the first is its root, the others have parents as in
        `DraftTree.parent_indices`.
        """


class BlockAttention(Protocol):
    """Attention of one draft forward, all requests at once."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [R * rows, Hq, Dh], key and value [R * rows, Hkv, Dh] -> [R * rows, Hq, Dh]."""


@dataclass(frozen=True)
class WindowSpec:
    """A drafter's own keys and values of the last `size` tokens before each anchor: one layer."""

    size: int
    num_kv_heads: int
    head_dim: int
    option: str
    """Name of the option that sets `size`, for messages."""


class DraftWindow(Protocol):
    """Keys and values of every request's last tokens, in memory that does not grow with context."""

    def missing(self, requests: DraftRequests) -> WindowTokens:
        """Tokens of the requests' windows that are not stored yet; they count as stored."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [M, Hkv, Dh] at `slots` [M]."""

    def attention(self, requests: DraftRequests, parents: list[np.ndarray]) -> RowAttention:
        """Attention over the window and the rows of a tree: row 0 of each request is its anchor,
        the others have parents as in `DraftTree.parent_indices`."""

    def forget(self, req_ids: Iterable[str]) -> None:
        """Frees the windows of requests that ended."""


class DeviceWindow(Protocol):
    """`DraftWindow` on devices that can draft without the host."""

    def missing(self, requests: DraftRequests | DeviceRequests) -> WindowTokens:
        """See `DraftWindow`. Of `DeviceRequests`, a bound of what is missing: tokens that are
        stored already are stored again, and what is before a request's first token has slot -1."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [M, Hkv, Dh] at `slots` [M]; nothing at -1."""

    def tree_attention(
        self,
        requests: DraftRequests | DeviceRequests,
        context_lens: torch.Tensor,
        parent_rows: torch.Tensor,
    ) -> RowAttention:
        """Attention of tree rows over the window before `context_lens` [R] and their own branch,
        for the requests of the last `missing`.

        Args:
            parent_rows: int32 [R, rows], see `DeviceCache.tree_attention`.
        """

    def forget(self, req_ids: Iterable[str]) -> None:
        """See `DraftWindow`."""


@dataclass(frozen=True)
class WindowTokens:
    """Tokens to be stored in windows, [M] int64 each."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class RowAttention(Protocol):
    """Attention of tree rows, requests one after the other."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [M, Hq, Dh], key and value [M, Hkv, Dh] of the rows -> [M, Hq, Dh]."""


class TargetCache(Protocol):
    """Keys and values of the target's last layer, in vLLM's paged cache."""

    def attention(
        self, req_indices: list[int], context_lens: list[int], rows: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Attention over the first `context_lens` positions of some requests.

        Args:
            req_indices: rows of the block table.
            rows: query rows of each request, one after the other.

        Returns:
            query [sum(rows), Hq, Dh] -> [sum(rows), Hq, Dh]; zeros where the context is empty.
        """


class DeviceTargetCache(Protocol):
    """`TargetCache` on devices that can draft without the host."""

    def level_attention(
        self, requests: DraftRequests | DeviceRequests, context_lens: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Attention over the first `context_lens` [R] positions of each request.

        Returns:
            query [R * rows, Hq, Dh], as many rows for each request -> [R * rows, Hq, Dh]; zeros
            where the context is empty.
        """


@dataclass(frozen=True)
class PartialCacheSpec:
    """Bounded caches for draft forwards of the target itself."""

    budget: int
    """Tokens kept per request, the sink included."""
    sink: int
    """First positions that are always kept."""
    refresh: int
    """Committed tokens after which the kept positions are chosen again."""
    max_requests: int
    """Requests kept at once."""
    options: tuple[str, str]
    """Names of the options that set `max_requests` and `budget`, for messages."""


class TargetForward(Protocol):
    """The target's own layers, run on anchors over partial caches."""

    def can_run(self, requests: DraftRequests | DeviceRequests) -> bool:
        """Whether there is room for all of these requests at once. Those on the device are given
        on a device alone."""

    def __call__(
        self, requests: DraftRequests | DeviceRequests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs each request's anchor; commits nothing.

        Returns:
            The target's final normed states and its last layer's outputs before that norm,
            [R, H] each.
        """

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops partial caches of requests that ended or were preempted."""

    @property
    def captures(self) -> bool:
        """Whether graphs may hold a call for requests without a history."""

    def prepare(self, requests: DeviceRequests) -> bool:
        """Does what a graph does not hold of a call for `requests`, which have a history. False
        where they need a call without one; then nothing was done."""


class Drafter(ABC):
    """One drafting method.

    Order of calls: `load`, then every step `observe` with what was committed and, when
    a request is to be drafted for, `propose`.
    """

    levels_run: int | None = None
    """Levels of the last draft forward, where each is a pass of its own."""
    drafts_by_level: ClassVar[bool] = False
    """Whether a draft forward is a pass for each level, which costs by its levels. Such drafts heed
    `min_node_prob` and `min_level_prob` where they are made on the host; a device ignores both."""

    reads_history: ClassVar[bool] = False
    """Whether `propose_on_device` needs `DeviceRequests.history`."""
    target_forward: TargetForward | None = None
    """See `bind_target_forward`; None before."""
    source: str | None = None
    """What the last draft on the device came from, where a drafter has several sources to choose
    from by what they bring."""

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

    def follow_target(self, target: TargetWeights) -> None:  # noqa: B027 - optional
        """Renews, in place, what `load` computed from weights of the target, which have changed.
        The embedding and the LM heads that `load` was given have followed already."""

    @abstractmethod
    def cache_specs(self) -> list[DraftCacheSpec]:
        """The caches that must live in vLLM's pages, one per draft layer."""

    def bind_cache(self, cache: DraftCache) -> None:
        """Gives the drafter its pages, once they exist."""
        self.cache = cache

    def window_spec(self) -> WindowSpec | None:
        """The window of its own that the drafter keeps, read after `load`; None for none."""
        return None

    def bind_window(
        self, window: DraftWindow | DeviceWindow, target_cache: TargetCache | DeviceTargetCache
    ) -> None:
        """Gives a drafter with a window that window and the target's last layer; both are those
        of a device, or neither is."""
        self.window, self.target_cache = window, target_cache

    def partial_cache_spec(self) -> PartialCacheSpec | None:
        """Partial caches for draft forwards of the target itself; None for none."""
        return None

    def bind_target_forward(
        self, forward: TargetForward, share: Callable[[list[float]], list[float]]
    ) -> None:
        """Gives a drafter that asked for it the target's forward.

        `share` replaces measured values by the first tensor parallel rank's, so that all ranks
        decide alike.
        """
        self.target_forward, self.share = forward, share

    observes_late: ClassVar[bool] = False
    """Whether `observe` may be called for the tokens of several steps at once, later, as long as it
    is before the next draft forward and before `forget` and `begin`."""

    @abstractmethod
    def observe(self, committed: CommittedTokens) -> None:
        """Takes in newly committed tokens, drafting or not. Called every step, or see
        `observes_late`."""

    def begin(self, req_id: str, req_index: int, num_cached: int) -> None:  # noqa: B027 - optional
        """A request starts, or comes back after preemption, on `num_cached` tokens that the cache
        has from others. Called on a host's own memory alone, after the `observe` of its first
        step; nothing by default.

        Args:
            req_index: of the request in the batch.
        """

    def set_deferred(self, is_deferring: bool) -> None:  # noqa: B027 - optional, not abstract
        """From here on no drafts are expected of most requests, or they are again. What is needed
        for drafts alone may then wait until `materialize_context`; nothing by default."""

    def pending_context_ms(self, req_ids: Sequence[str]) -> list[float]:
        """[R] milliseconds of work that a draft forward for each request must wait for, beside that
        of the forward itself; `math.inf` for requests that can have none. 0 by default."""
        return [0.0] * len(req_ids)

    def materialize_context(self, requests: DraftRequests) -> None:  # noqa: B027 - optional, not abstract
        """Does what `pending_context_ms` told of the requests that are now drafted for; nothing by
        default."""

    def flush_context(self) -> None:  # noqa: B027 - optional, not abstract
        """Does what `observe` put off until a draft needs it; nothing by default.

        Called before a first draft after steps without one, whose work would else count as the
        draft's.
        """

    def forget(self, req_ids: Iterable[str]) -> None:  # noqa: B027 - optional, not abstract
        """Drops what is kept for requests that ended; nothing by default."""

    @property
    def forward_depth(self) -> int:
        """Deepest node a draft forward gives. 0: there is no forward, or `propose` does not heed
        `forward_depths`; it is then called in every step, but where lookups rest."""
        return 0

    @property
    def has_lookup(self) -> bool:
        """Whether `lookup` may find anything."""
        return type(self).lookup is not Drafter.lookup

    def lookup(self, requests: DraftRequests) -> list[DraftTree]:
        """Trees that need no forward, one per request. Called before `propose`, so that a forward
        is run only where it adds enough; they are verified where none is. `propose` looks up on
        its own, and its trees may lack nodes of these or score them otherwise."""
        return [DraftTree.empty()] * len(requests)

    @abstractmethod
    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        """One tree per request, within its budget, width and depth."""

    @property
    def drafts_on_device(self) -> bool:
        """Whether `propose_on_device` and `device_branches` stand for `propose`: without branches
        they give the same trees; on a device branches are looked up after the anchor alone."""
        return False

    @property
    def device_branches(self) -> NgramBranches | None:
        """The n-gram branches that are looked up on the device and merged into the trees of
        `propose_on_device`; None for none."""
        return None

    def learn(self, source: str, tokens: float, milliseconds: float) -> None:  # noqa: B027 - optional
        """Takes in what a step with a draft from `source` brought: tokens per request, and how long
        it took. Called a step or two late, where drafts are made on the device."""

    @property
    def rehearsed_depth(self) -> int:
        """Deepest node of drafts that are rehearsed at start, to compile what they compile and to
        take the memory they take."""
        return self.forward_depth

    def rehearse(self, requests: DraftRequests) -> None:
        """Drafts for dummies as deep as their depths say, on a device: from every source."""
        self.propose(requests)

    @property
    def drafts_from_graphs(self) -> bool:
        """Whether `propose_on_device` may be captured: it makes trees of its own, what it launches
        depends on the number of requests and `deepest` alone, and what it reads beside its
        arguments and `request_states` stays where it is."""
        return False

    @property
    def can_be_captured(self) -> bool:
        """Whether a drafter that `drafts_from_graphs` has all that it needs for it. Not before
        caches are bound, where graphs are captured to measure their memory."""
        return True

    def enter_graph(self, requests: DeviceRequests) -> bool:
        """Does what a graph does not hold of a draft for `requests`, all of a batch. False where
        they are to be given to `propose_on_device` instead. Called before every replay."""
        return True

    @property
    def request_states(self) -> torch.Tensor | None:
        """[B, ...] what `propose_on_device` reads of each request of the batch beside its
        arguments, made anew in every step; as many as there were requests in the last step, 0
        before the first. None for nothing."""
        return None

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees | None:
        """One tree per request without a read on the host, n-gram branches left out; None where
        there is nothing but these. Called where `drafts_on_device`."""
        raise NotImplementedError
