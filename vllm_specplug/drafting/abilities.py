# SPDX-License-Identifier: Apache-2.0
"""Optional abilities of a drafter, one mixin for each.

`Drafter` inherits all of them. Their defaults do nothing; a method overrides those that it
supports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from vllm_specplug.drafting.caches import (
    DraftWindow,
    PartialCacheSpec,
    TargetCache,
    TargetCacheSpec,
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

    `late_context.LateContextDrafter` implements it for a paged cache.
    """

    def begin(self, req_id: str, req_index: int, num_cached: int) -> None:
        """Starts a request, or resumes it after preemption.

        Called only if the cache is in host memory, after the `observe` of the request's first step.

        Args:
            req_index: index of the request in the batch.
            num_cached: tokens of its prefix whose cache entries other requests have computed.
        """

    def set_deferred(self, is_deferring: bool) -> None:
        """Tells whether most requests will get no drafts from now on.

        If so, work that only drafts need may wait until `materialize_context`.
        """

    def pending_context_ms(self, req_ids: Sequence[str]) -> list[float]:
        """Returns [R] milliseconds of deferred work that each request's draft forward must wait
        for; `math.inf` for requests that cannot be drafted for."""
        return [0.0] * len(req_ids)

    def materialize_context(self, requests: DraftRequests) -> None:
        """Does the deferred work of the requests that are now drafted for."""


class Lookup:
    """Trees that need no draft forward, for instance from n-grams."""

    @property
    def has_lookup(self) -> bool:
        """Whether `lookup` may return trees with nodes."""
        return type(self).lookup is not Lookup.lookup

    def lookup(self, requests: DraftRequests) -> list[DraftTree]:
        """Returns one tree per request without a draft forward.

        Called before `propose`, so that a forward runs only for requests for which it adds enough;
        the other requests verify these trees. `propose` does its own lookups, and its trees may
        lack nodes of these or give them other scores.
        """
        return [DraftTree.empty()] * len(requests)


class LevelPasses:
    """Draft forwards with one pass per level."""

    levels_run: int | None = None
    """Number of passes of the last draft forward; None if passes do not correspond to levels."""

    drafts_by_level: ClassVar[bool] = False
    """Whether a draft forward runs one pass per level, so that its cost depends on the number of
    levels. On the host such drafts observe `min_node_prob` and `min_level_prob`; on a device they
    ignore both."""


class OwnWindow:
    """The drafter's own keys and values of each request's last tokens."""

    def window_spec(self) -> WindowSpec | None:
        """Returns the drafter's own window, read after `load`; None for none."""
        return None

    def bind_window(self, window: DraftWindow) -> None:
        """Gives a drafter its window."""
        self.window = window


class TargetCaches:
    """Attention over keys and values of the target's own layers."""

    first_rank: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Overwrites a tensor with the first tensor parallel rank's, without a wait on the host, and
    returns it. None if this rank has all KV heads.

    If not None, attention over the target's caches gathers the heads of all ranks, so every rank
    must run the same draft forwards of the same rows. The planner shares which ones; a drafter
    whose rows depend on computed values shares those."""
    follows_first_rank: ClassVar[bool] = False
    """Whether the drafter shares its rows by `first_rank`; if not, several ranks are refused."""

    def target_cache_specs(self) -> list[TargetCacheSpec]:
        """Returns the caches of the target that drafts attend, read after `load`; none by
        default."""
        return []

    def bind_target_caches(self, caches: Sequence[TargetCache]) -> None:
        """Gives a drafter the caches of `target_cache_specs`, once they exist."""
        self.target_caches = caches


class SelfDraft:
    """Drafts from the target's own layers over partial caches."""

    target_forward: TargetForward | None = None
    """The target's forward; None before `bind_target_forward`."""

    def partial_cache_spec(self) -> PartialCacheSpec | None:
        """Returns the partial caches for draft forwards of the target itself; None for none."""
        return None

    def bind_target_forward(self, forward: TargetForward) -> None:
        """Gives the drafter the target's forward, if it has a `partial_cache_spec`."""
        self.target_forward = forward


class OnDeviceDrafting:
    """Trees that are built on the device, without a read on the host."""

    drafts_on_device: bool = False
    """Whether `propose_on_device` and `device_branches` replace `propose` on a device.

    Without branches their trees are the same. On a device, branches are looked up only after the
    anchor."""

    @property
    def device_branches(self) -> NgramBranches | None:
        """The n-gram branches that the device looks up and merges into the trees of
        `propose_on_device`; None for none."""
        return None

    reads_history: ClassVar[bool] = False
    """Whether `propose_on_device` needs `DeviceRequests.history`."""

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees | None:
        """Returns one tree per request without a read on the host and without n-gram branches.

        Returns None if the drafter drafts only branches. Called only if `drafts_on_device`.
        """
        raise NotImplementedError


class GraphCapture:
    """`propose_on_device` and `observe` in CUDA graphs."""

    drafts_from_graphs: bool = False
    """Whether `propose_on_device` may be captured.

    It must return new trees, its launches may depend only on the number of requests and
    `max_depth`, and the memory that it reads besides its arguments and `request_states` must not
    move."""

    observes_from_graphs: bool = False
    """Whether `observe` may be captured on a device.

    It may read only states, rows, positions and slots, must store nothing at slot -1, and its
    launches may depend only on the number of tokens."""

    @property
    def can_be_captured(self) -> bool:
        """Whether a drafter that `drafts_from_graphs` is ready for capture.

        It is not before its caches are bound, when graphs are captured to measure their memory.
        """
        return True

    def enter_graph(self, requests: DeviceRequests) -> bool:
        """Does the work outside the graph of a draft for `requests`, which are a full batch.

        Called before every replay. Returns False if `propose_on_device` must run instead.
        """
        return True

    @property
    def request_states(self) -> torch.Tensor | None:
        """[B, ...] what `propose_on_device` reads of each request of the batch besides its
        arguments; None for nothing.

        Every step makes a new tensor, with one entry per request of the last step (0 before the
        first).
        """
        return None
