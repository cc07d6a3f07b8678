# SPDX-License-Identifier: Apache-2.0
"""What a drafter may do beside the few methods of `Drafter`, one mixin for each.

`Drafter` has all of them with these defaults, which do nothing: a method overrides those of what it
can do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from vllm_specplug.drafting.caches import (
    DeviceTargetCache,
    DeviceWindow,
    DraftWindow,
    PartialCacheSpec,
    TargetCache,
    TargetForward,
    WindowSpec,
)
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.tree import DraftTree

if TYPE_CHECKING:
    import torch

    from vllm_specplug.drafting.ngram import NgramBranches


class DeferredContext:
    """Context that is computed when a draft needs it, not when its tokens are committed.

    `late_context.LateContextDrafter` implements all of it over a paged cache.
    """

    observes_late: ClassVar[bool] = False
    """Whether `observe` may be called for the tokens of several steps at once, later, as long as it
    is before the next draft forward and before `forget` and `begin`."""

    def begin(self, req_id: str, req_index: int, num_cached: int) -> None:
        """A request starts, or comes back after preemption, on `num_cached` tokens that the cache
        has from others. Only called where memory is the host's, after the `observe` of its first
        step; nothing by default.

        Args:
            req_index: of the request in the batch.
        """

    def set_deferred(self, is_deferring: bool) -> None:
        """From here on no drafts are expected of most requests, or they are again. What is needed
        for drafts only may then wait until `materialize_context`; nothing by default."""

    def pending_context_ms(self, req_ids: Sequence[str]) -> list[float]:
        """[R] milliseconds of work that a draft forward for each request must wait for, beside that
        of the forward itself; `math.inf` for requests that can have none. 0 by default."""
        return [0.0] * len(req_ids)

    def materialize_context(self, requests: DraftRequests) -> None:
        """Does what `pending_context_ms` told of the requests that are now drafted for; nothing by
        default."""

    def flush_context(self) -> None:
        """Does what `observe` put off until a draft needs it; nothing by default.

        Called before a first draft after steps without one, whose work would else count as the
        draft's.
        """


class Lookup:
    """Trees that need no draft forward, for instance from n-grams."""

    @property
    def has_lookup(self) -> bool:
        """Whether `lookup` may find anything."""
        return type(self).lookup is not Lookup.lookup

    def lookup(self, requests: DraftRequests) -> list[DraftTree]:
        """Trees that need no forward, one per request. Called before `propose`, so that a forward
        is run only where it adds enough; they are verified where none is. `propose` looks up on
        its own, and its trees may lack nodes of these or score them otherwise."""
        return [DraftTree.empty()] * len(requests)


class LevelPasses:
    """Draft forwards that are one pass for each level."""

    levels_run: int | None = None
    """Levels of the last draft forward, where each is a pass of its own."""

    drafts_by_level: ClassVar[bool] = False
    """Whether a draft forward is a pass for each level, which costs by its levels. Such drafts heed
    `min_node_prob` and `min_level_prob` where they are made on the host; a device ignores both."""


class OwnWindow:
    """The drafter's own keys and values of each request's last tokens."""

    def window_spec(self) -> WindowSpec | None:
        """The window of its own that the drafter keeps, read after `load`; None for none."""
        return None

    def bind_window(
        self, window: DraftWindow | DeviceWindow, target_cache: TargetCache | DeviceTargetCache
    ) -> None:
        """Gives a drafter with a window that window and the target's last layer; both are those
        of a device, or neither is."""
        self.window, self.target_cache = window, target_cache


class SelfDraft:
    """The target's own layers as the draft, over partial caches."""

    target_forward: TargetForward | None = None
    """See `bind_target_forward`; None before."""

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


class OnDeviceDrafting:
    """Trees that are built on the device, without a read on the host."""

    @property
    def drafts_on_device(self) -> bool:
        """Whether `propose_on_device` and `device_branches` stand for `propose`: without branches
        they give the same trees; on a device branches are only looked up after the anchor."""
        return False

    @property
    def device_branches(self) -> NgramBranches | None:
        """The n-gram branches that are looked up on the device and merged into the trees of
        `propose_on_device`; None for none."""
        return None

    reads_history: ClassVar[bool] = False
    """Whether `propose_on_device` needs `DeviceRequests.history`."""

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees | None:
        """One tree per request without a read on the host, n-gram branches left out; None where
        there is nothing but these. Called where `drafts_on_device`."""
        raise NotImplementedError

    source: str | None = None
    """What the last draft on the device came from, where a drafter has several sources to choose
    from by what they bring."""

    def learn(self, source: str, tokens: float, milliseconds: float) -> None:
        """Takes in what a step with a draft from `source` brought: tokens per request, and how long
        it took. Called a step or two late, where drafts are made on the device."""


class GraphCapture:
    """`propose_on_device`, and `observe`, in CUDA graphs."""

    @property
    def drafts_from_graphs(self) -> bool:
        """Whether `propose_on_device` may be captured: it makes trees of its own, what it launches
        only depends on the number of requests and `deepest`, and what it reads beside its
        arguments and `request_states` stays where it is."""
        return False

    @property
    def observes_from_graphs(self) -> bool:
        """Whether `observe` with `flush_context` may be captured on a device: it needs no more than
        states, rows, positions and slots, stores nothing where a slot is -1, and what it launches
        depends on the number of tokens only."""
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
