# SPDX-License-Identifier: Apache-2.0
"""Decides before a draft forward for which requests it pays, and how deep it goes.

The candidates of a forward are unknown until it has run. A histogram of earlier forwards replaces
them. It counts the nodes that a forward of depth D added beyond lookups, by probability of
acceptance. It is averaged over all requests and scaled by a factor per request. These expected
nodes are then evaluated like real nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specplug.budget import Bools, Floats, Ints

DraftCost = Callable[[npt.ArrayLike, npt.ArrayLike], Floats]
"""Milliseconds of drafting by number of requests and depth."""

_EDGES = np.array([0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96])
_BINS = len(_EDGES) + 1

_DECAY = 0.99
"""Decay of earlier drafts in the histogram, per draft."""
_PRIOR_DRAFTS = 3.0
_PRIOR_FIRST, _PRIOR_DEEPER = 0.65, 0.7
"""Prior probability of the best node of the first depth, and of a deeper one given its parent."""

_REQUEST_DECAY = 0.9
_REQUEST_PRIOR = 2.0
"""Weight, in expected tokens, of the prior that a request is average."""

IMPOSSIBLE_MS = 1e9
"""Time of a step with more rows than it may have."""

TURN_ON, STAY_ON = 1.04, 1.02
"""Minimum gain over plain decoding for drafting to start, and to continue. The best of many
estimates tends to be too high, so a choice that looks equal is a loss."""
PROBE_SHARE = 0.005
"""Share of the time for forwards that only measure whether drafting, or deeper drafting, pays."""
PAYBACK_STEPS = 32
"""Minimum number of steps over which a pending cost is spread."""


@dataclass(frozen=True)
class GateDecision:
    """The requests that get a draft forward."""

    depths: Ints
    """[R] depth of the forward; 0 for no forward."""
    is_probe: bool = False


@dataclass(frozen=True)
class _Choices:
    """Estimates of all choices, in which the first `sizes[i]` requests draft to depth option j."""

    # [sizes] numbers of requests
    sizes: Ints
    # [sizes, depths, bins] expected tokens and milliseconds with the nodes of the best bins
    tokens: Floats
    milliseconds: Floats
    plain_rate: float
    """Tokens per millisecond of a step without any forward."""

    def best(self, pending_ms: Floats) -> tuple[int, int, float]:
        """Returns the indices of the best size and the best depth, and their gain.

        Args:
            pending_ms: [sizes] additional milliseconds.
        """
        rates = (self.tokens / (self.milliseconds + pending_ms[:, None, None])).max(axis=2)
        best = int(np.argmax(rates))
        size, depth = divmod(best, rates.shape[1])
        return size, depth, float(rates.flat[best]) / self.plain_rate


class DraftGate:
    """Decides on draft forwards.

    Args:
        max_depth: maximum depth that a forward can draft.
    """

    def __init__(self, max_depth: int) -> None:
        assert max_depth >= 1
        self.max_depth = max_depth
        options = {1, 2, 3, 5, 8, 12, 16, 32, max_depth}
        self._depth_options = np.array(sorted(d for d in options if d <= max_depth))
        # [max_depth, bins] number of nodes that forwards added, and sum of their probabilities
        self._counts = np.zeros((max_depth, _BINS))
        self._sums = np.zeros((max_depth, _BINS))
        # [max_depth] number of drafts that reached each depth
        self._drafts = np.full(max_depth, _PRIOR_DRAFTS)
        probability = _PRIOR_FIRST
        for depth in range(max_depth):
            column = np.searchsorted(_EDGES, probability)
            self._counts[depth, column] = _PRIOR_DRAFTS
            self._sums[depth, column] = _PRIOR_DRAFTS * probability
            probability *= _PRIOR_DEEPER
        # By slot: expected tokens that forwards added, and that the histogram predicted.
        self._added = np.full(64, _REQUEST_PRIOR)
        self._expected = np.full(64, _REQUEST_PRIOR)
        # The result of `_make_averages`, until the next observation.
        self._averages: tuple[Floats, Floats] | None = None
        self.is_on = True
        """Whether drafts paid off in the last decision."""
        # Steps in which drafts would have paid off without their pending costs.
        self._steps_pending = 0
        self._is_pending = False
        self._steps_since_forward = 0
        self._probes = 0
        # Milliseconds saved up for the additional time of a forward of full depth.
        self._depth_credit = 0.0

    def decide(
        self,
        # [R] slots of the requests that may draft
        slots: Ints,
        # [R] maximum depth of each request
        limits: Ints,
        # [N] probabilities of the nodes from lookups, and their requests (0..R-1)
        lookup_probs: Floats,
        owners: Ints,
        base_tokens: float,
        draft_ms: DraftCost,
        # [M + 1] ms of a step with 0..M nodes, without drafting
        step_ms: Floats,
        # [R] weight of a token of each request; None for equal weights
        weights: Floats | None = None,
        # [R] additional ms of the first forward for each request
        pending_ms: Floats | None = None,
    ) -> GateDecision:
        """Chooses the requests that draft, and their depth.

        A pending cost is paid once, but the number of drafts that follow is unknown. It is spread
        over `PAYBACK_STEPS` steps plus the number of steps in which drafts would have paid off
        without it. So it is paid, at the latest, when waiting has cost as much.
        """
        num_reqs = len(slots)
        depths = np.zeros(num_reqs, np.int64)
        allowed = limits > 0
        if not allowed.any():
            return GateDecision(depths)
        self._grow(int(slots.max()))
        weights = np.ones(num_reqs) if weights is None else weights
        pending_ms = np.zeros(num_reqs) if pending_ms is None else pending_ms
        scale = self._added[slots] / self._expected[slots]
        # Of equal requests, those with the smallest pending cost come first.
        order = np.lexsort((pending_ms, np.where(allowed, -scale * weights, np.inf)))
        order = order[: int(allowed.sum())]
        bins = _BINS - 1 - np.searchsorted(_EDGES, lookup_probs)
        choices = self._choices(
            scale[order],
            weights[order],
            np.bincount(bins, minlength=_BINS),
            base_tokens + np.bincount(bins, lookup_probs * weights[owners], _BINS).cumsum(),
            base_tokens,
            draft_ms,
            step_ms,
        )
        size, depth, gain = self._best(choices, pending_ms[order])
        self.is_on = gain >= (STAY_ON if self.is_on else TURN_ON)
        if not self.is_on:
            probe_ms = float(draft_ms(1, self.max_depth))
            request = self._probe(allowed, pending_ms, probe_ms, float(step_ms[0]))
            if request is None:
                return GateDecision(depths)
            depths[request] = limits[request]
            return GateDecision(depths, is_probe=True)
        self._steps_since_forward = self._steps_pending = 0
        chosen = order[: choices.sizes[size]]
        depths[chosen] = np.minimum(limits[chosen], self._depth_options[depth])
        is_probe = self._probes_depth(limits[chosen], depths[chosen], draft_ms, float(step_ms[0]))
        if is_probe:
            depths[chosen] = limits[chosen]
        return GateDecision(depths, is_probe)

    def _choices(
        self,
        # [R'] of the requests that may draft, best first
        scale: Floats,
        weights: Floats,
        # [bins] number of nodes from lookups, and expected tokens with the nodes of the best bins
        lookup_counts: Ints,
        lookup_tokens: Floats,
        base_tokens: float,
        draft_ms: DraftCost,
        step_ms: Floats,
    ) -> _Choices:
        if self._averages is None:
            self._averages = self._make_averages()
        counts, sums = self._averages
        num_allowed = len(scale)
        sizes = np.array(sorted({-(-num_allowed // 4), -(-num_allowed // 2), num_allowed}))
        # [sizes, 1, 1] forwards for these requests, as a number of average forwards
        forwards = scale.cumsum()[sizes - 1, None, None]
        weighted = (scale * weights).cumsum()[sizes - 1, None, None]
        nodes = np.maximum(lookup_counts.cumsum() + forwards * counts, 0.0)
        drafting = draft_ms(sizes[:, None], self._depth_options)
        numbers = np.arange(len(step_ms))
        lookup_ms = np.interp(lookup_counts.cumsum(), numbers, step_ms, right=IMPOSSIBLE_MS)
        return _Choices(
            sizes,
            lookup_tokens + weighted * sums,
            np.interp(nodes, numbers, step_ms, right=IMPOSSIBLE_MS) + drafting[:, :, None],
            max(base_tokens / float(step_ms[0]), float((lookup_tokens / lookup_ms).max())),
        )

    def _best(self, choices: _Choices, pending_ms: Floats) -> tuple[int, int, float]:
        """Returns `_Choices.best` with the pending costs [R'] spread over steps."""
        pending = pending_ms.cumsum()[choices.sizes - 1]
        size, depth, gain = choices.best(np.zeros(len(pending)))
        pays = gain >= (STAY_ON if self.is_on else TURN_ON)
        self._is_pending = pays and bool(pending[-1])
        if not self._is_pending:
            return size, depth, gain
        self._steps_pending += 1
        return choices.best(pending / (PAYBACK_STEPS + self._steps_pending))

    def _probe(
        self, allowed: Bools, pending_ms: Floats, probe_ms: float, plain_ms: float
    ) -> int | None:
        """Returns the index of a request to draft for although drafts do not pay, or None.

        Requests take turns, so none depends on the estimates of another forever. A request with a
        pending cost above `probe_ms` is skipped, unless all of them have one.
        """
        self._steps_since_forward += 1
        max_pending_ms = max(probe_ms, float(pending_ms[allowed].min()))
        candidates = np.flatnonzero(allowed & (pending_ms <= max_pending_ms))
        chosen = int(candidates[self._probes % len(candidates)])
        price = probe_ms + float(pending_ms[chosen])
        if self._steps_since_forward * PROBE_SHARE * plain_ms < price:
            return None
        self._probes += 1
        self._steps_since_forward = 0
        return chosen

    def _probes_depth(
        self,
        # [R'] of the requests to draft for: maximum and chosen depth
        limits: Ints,
        chosen: Ints,
        draft_ms: DraftCost,
        plain_ms: float,
    ) -> bool:
        """Returns whether this forward should have the maximum depth, to measure the depths below
        the chosen one. Otherwise these would keep their prior."""
        if (limits == chosen).all():
            return False
        deep, shallow = draft_ms(len(limits), np.array([limits.mean(), chosen.mean()]))
        self._depth_credit += PROBE_SHARE * plain_ms
        if self._depth_credit < deep - shallow:
            return False
        self._depth_credit = 0.0
        return True

    def skip(self) -> None:
        """Counts a plain step without a decision."""
        self._steps_since_forward += 1
        self._steps_pending += self._is_pending

    def observe(
        self,
        # [R] slots of the requests that got a forward, and the depth it reached
        slots: Ints,
        reached: Ints,
        # [N] probability, depth and request (0..R-1) of all nodes
        nodes: tuple[Floats, Ints, Ints],
        # [M] the same for the nodes from lookups
        lookup_nodes: tuple[Floats, Ints, Ints],
    ) -> None:
        """Learns from the nodes that forwards added."""
        num_reqs = len(slots)
        if not num_reqs:
            return
        self._grow(int(slots.max()))
        new_counts = np.zeros(self._counts.size)
        new_sums = np.zeros(self._counts.size)
        for sign, (probabilities, depths, owners) in ((1.0, nodes), (-1.0, lookup_nodes)):
            is_reached = depths <= np.minimum(reached, self.max_depth)[owners]
            p = probabilities[is_reached]
            cells = (depths[is_reached] - 1) * _BINS + np.searchsorted(_EDGES, p)
            new_counts += sign * np.bincount(cells, minlength=new_counts.size)
            new_sums += sign * np.bincount(cells, p, new_sums.size)
        # [max_depth] drafts that reached each depth
        per_depth = (reached[:, None] > np.arange(self.max_depth)).sum(axis=0)
        averages = (self._sums / self._drafts[:, None]).sum(axis=1)
        expected = np.cumsum(averages)[np.minimum(reached, self.max_depth) - 1]
        keep = _DECAY**per_depth
        self._drafts = self._drafts * keep + per_depth
        self._counts = self._counts * keep[:, None] + new_counts.reshape(self._counts.shape)
        self._sums = self._sums * keep[:, None] + new_sums.reshape(self._sums.shape)
        self._averages = None
        # Without any node, numpy counts in integers.
        added = np.bincount(nodes[2], nodes[0], num_reqs) - np.bincount(
            lookup_nodes[2], lookup_nodes[0], num_reqs
        )
        prior = (1 - _REQUEST_DECAY) * _REQUEST_PRIOR
        self._added[slots] = _REQUEST_DECAY * self._added[slots] + prior + np.maximum(added, 0.0)
        self._expected[slots] = (
            _REQUEST_DECAY * self._expected[slots] + prior + np.maximum(expected, 1e-3)
        )

    def _make_averages(self) -> tuple[Floats, Floats]:
        """Returns [depth options, bins] the number of nodes that one forward adds in the best bins,
        and the sum of their probabilities."""
        weights = self._drafts[:, None]
        options = self._depth_options - 1
        counts = np.cumsum(self._counts / weights, axis=0)[options, ::-1]
        sums = np.cumsum(self._sums / weights, axis=0)[options, ::-1]
        return np.cumsum(counts, axis=1), np.cumsum(sums, axis=1)

    def reset(self, slot: int) -> None:
        """Gives this slot to a new request."""
        self._grow(slot)
        self._added[slot] = self._expected[slot] = _REQUEST_PRIOR

    def _grow(self, slot: int) -> None:
        while slot >= len(self._added):
            prior = np.full(len(self._added), _REQUEST_PRIOR)
            self._added = np.concatenate([self._added, prior])
            self._expected = np.concatenate([self._expected, prior])
