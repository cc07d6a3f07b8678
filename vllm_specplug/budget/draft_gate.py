# SPDX-License-Identifier: Apache-2.0
"""Which requests a draft forward pays for, and how deep, decided before it is run.

What a forward will find is not known beforehand, but what earlier ones found is: how many nodes
of which acceptance probability a forward of depth D added to what lookups had found anyway. That
histogram, averaged over all requests and scaled by how each request compares with it, stands in
for the candidates to come; whether they pay is then the same question as for real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specplug.budget.cost_curve import Floats

Ints = npt.NDArray[np.int64]

_EDGES = np.array([0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96])
_BINS = len(_EDGES) + 1

_DECAY = 0.99
"""Decay of earlier drafts in the histograms, per draft."""
_PRIOR_DRAFTS = 3.0
_PRIOR_FIRST, _PRIOR_DEEPER = 0.65, 0.7
"""Until something was drafted: the best node of each depth has this probability, times its parent's
below the first."""

_REQUEST_DECAY = 0.9
_REQUEST_PRIOR = 2.0
"""Expected tokens that "this request is like the others" is worth."""

IMPOSSIBLE_MS = 1e9
"""Time of a step with more rows than it may have."""

TURN_ON, STAY_ON = 1.04, 1.02
"""How much better than without it drafting must look to start, and to go on. The choice that looks
best of many is one whose estimate errs upwards, so what looks equal is a loss."""
PROBE_SHARE = 0.005
"""Share of the time for forwards that only measure whether drafting, or drafting deeper, would pay.
"""
DEBT_STEPS = 32
"""Steps of drafts that have to pay for what they need first, see `DraftGate.decide`."""


@dataclass(frozen=True)
class GateDecision:
    """Which requests get a draft forward."""

    depths: Ints
    """[R] deepest node to draft, 0 for no forward."""
    gain: float
    """Expected tokens per millisecond over those without any forward; 1 without."""
    is_probe: bool = False


def _hints(owners: Ints, num_reqs: int) -> Ints:
    """[num_reqs] 1 for requests that own a node of lookups, else 0."""
    hints: Ints = np.minimum(np.bincount(owners, minlength=num_reqs), 1)
    return hints


class DraftGate:
    """Decides on draft forwards.

    Args:
        deepest: deepest node a forward can draft.
    """

    def __init__(self, deepest: int) -> None:
        assert deepest >= 1
        self.deepest = deepest
        steps = {1, 2, 3, 5, 8, 12, 16, 32, deepest}
        self._depth_options = np.array(sorted(d for d in steps if d <= deepest))
        # [2, deepest, _BINS] nodes a forward added, by "lookups found something", depth and
        # probability; their number and their sum of probabilities
        self._counts = np.zeros((2, deepest, _BINS))
        self._sums = np.zeros((2, deepest, _BINS))
        # [2, deepest] drafts behind them
        self._drafts = np.full((2, deepest), _PRIOR_DRAFTS)
        probability = _PRIOR_FIRST
        for depth in range(deepest):
            place = np.searchsorted(_EDGES, probability)
            self._counts[:, depth, place] = _PRIOR_DRAFTS
            self._sums[:, depth, place] = _PRIOR_DRAFTS * probability
            probability *= _PRIOR_DEEPER
        self._found = np.full(64, _REQUEST_PRIOR)
        self._expected = np.full(64, _REQUEST_PRIOR)
        # What `_make_averages` gives, until something is observed.
        self._averages: tuple[Floats, Floats] | None = None
        self.is_on = True
        """Whether the last decision was that drafts pay."""
        # Steps for which drafts would have paid but for what they need first.
        self._steps_in_debt = 0
        self._is_in_debt = False
        self._steps_since_forward = 0
        self._probes = 0
        # Milliseconds that a forward deeper than wanted may take more.
        self._depth_credit = 0.0

    def decide(
        self,
        # [R] slots of the requests that may draft
        slots: Ints,
        # [R] deepest node allowed for each
        limits: Ints,
        # [N] probabilities of the nodes that lookups found, and whose they are (0..R-1)
        found: Floats,
        owners: Ints,
        base_tokens: float,
        # requests, depth -> ms of drafting
        draft_ms: Callable[[npt.ArrayLike, npt.ArrayLike], Floats],
        # [M + 1] ms of a step with 0..M nodes, drafting excluded
        step_ms: Floats,
        # [R] what a token of each request counts, None for alike
        weights: Floats | None = None,
        # [R] ms that the first forward for each request takes beside the forward itself
        debts: Floats | None = None,
    ) -> GateDecision:
        """Which requests to run a draft forward for, and to which depth.

        Debts are paid once, and nobody knows for how many steps: they are spread over `DEBT_STEPS`
        and as many more as drafts would have paid without them. So a debt is taken on, at the
        latest, when as much has been lost by waiting.
        """
        num_reqs = len(slots)
        none = GateDecision(np.zeros(num_reqs, np.int64), 1.0)
        allowed = limits > 0
        if not allowed.any():
            return none
        self._grow(int(slots.max()))
        hints = _hints(owners, num_reqs)
        weights = np.ones(num_reqs) if weights is None else weights
        scale = self._found[slots] / self._expected[slots]
        debts = np.zeros(num_reqs) if debts is None else debts
        # Of equals those come first that owe least.
        order = np.lexsort((debts, np.where(allowed, -scale * weights, np.inf)))
        order = order[: int(allowed.sum())]
        most = len(order)
        sizes = np.array(sorted({-(-most // 4), -(-most // 2), most}))

        # [2, deepest, bins] average additions of one forward by depth reached, best bins first
        if self._averages is None:
            self._averages = self._make_averages()
        counts, sums = self._averages
        # [sizes, 2] forwards for the first `size` requests, scaled by what they find, and by what
        # that counts
        of_kind = hints[order][:, None] == np.arange(2)
        forwards = (scale[order, None] * of_kind).cumsum(axis=0)[sizes - 1]
        weighted = ((scale * weights)[order, None] * of_kind).cumsum(axis=0)[sizes - 1]
        # [sizes, depths, bins] candidates in all, best bins first
        place = _BINS - 1 - np.searchsorted(_EDGES, found)
        shape = (len(sizes), len(self._depth_options), _BINS)
        found_counts = np.bincount(place, minlength=_BINS)
        found_sums = np.bincount(place, found * weights[owners], _BINS)
        nodes = (forwards @ counts.reshape(2, -1)).reshape(shape) + found_counts
        gains = (weighted @ sums.reshape(2, -1)).reshape(shape) + found_sums
        nodes = np.maximum(np.cumsum(nodes, axis=2), 0.0)
        gains = np.cumsum(gains, axis=2)
        all_ms = np.arange(len(step_ms))
        drafting = draft_ms(sizes[:, None], self._depth_options)
        ms = np.interp(nodes, all_ms, step_ms, right=IMPOSSIBLE_MS) + drafting[:, :, None]
        rates = ((base_tokens + gains) / ms).max(axis=2)

        plain = base_tokens / float(step_ms[0])
        if len(found):
            without = (base_tokens + np.cumsum(found_sums)) / np.interp(
                np.cumsum(found_counts), all_ms, step_ms, right=IMPOSSIBLE_MS
            )
            plain = max(plain, float(without.max()))

        enough = STAY_ON if self.is_on else TURN_ON
        best = int(np.argmax(rates))
        gain = float(rates.flat[best]) / plain
        owed = debts[order].cumsum()[sizes - 1]
        self._is_in_debt = gain >= enough and bool(owed[-1])
        if self._is_in_debt:
            self._steps_in_debt += 1
            ms = ms + (owed / (DEBT_STEPS + self._steps_in_debt))[:, None, None]
            rates = ((base_tokens + gains) / ms).max(axis=2)
            best = int(np.argmax(rates))
            gain = float(rates.flat[best]) / plain
        size, depth = divmod(best, len(self._depth_options))
        depths = np.zeros(num_reqs, np.int64)
        if gain >= enough:
            self.is_on = True
            self._steps_since_forward = self._steps_in_debt = 0
            chosen = order[: sizes[size]]
            depths[chosen] = np.minimum(limits[chosen], self._depth_options[depth])
            is_probe = self._sees_deeper(limits[chosen], depths[chosen], draft_ms, step_ms)
            if is_probe:
                depths[chosen] = limits[chosen]
            return GateDecision(depths, gain, is_probe)
        self.is_on = False
        self._steps_since_forward += 1
        probed = self._probe(allowed, debts, float(draft_ms(1, self.deepest)), float(step_ms[0]))
        if probed is None:
            return GateDecision(depths, 1.0)
        depths[probed] = limits[probed]
        return GateDecision(depths, gain, is_probe=True)

    def _probe(
        self, allowed: npt.NDArray[np.bool_], debts: Floats, probe_ms: float, plain_ms: float
    ) -> int | None:
        """Index of a request to draft for although it does not pay; None for none.

        In turn, so that no request depends on another's estimate for ever; but not of those that
        owe more than the probe itself, unless all do.
        """
        most_debt = max(probe_ms, float(debts[allowed].min()))
        candidates = np.flatnonzero(allowed & (debts <= most_debt))
        chosen = int(candidates[self._probes % len(candidates)])
        price = probe_ms + float(debts[chosen])
        if self._steps_since_forward * PROBE_SHARE * plain_ms < price:
            return None
        self._probes += 1
        self._steps_since_forward = 0
        return chosen

    def _sees_deeper(
        self,
        # [R] of the requests to draft for: deepest node allowed, and wanted
        limits: Ints,
        wanted: Ints,
        draft_ms: Callable[[npt.ArrayLike, npt.ArrayLike], Floats],
        step_ms: Floats,
    ) -> bool:
        """Whether this forward goes as deep as it may, to measure what lies below the depth that
        looks best: what was never drafted keeps its first estimate."""
        if (limits == wanted).all():
            return False
        deep, shallow = draft_ms(len(limits), np.array([limits.mean(), wanted.mean()]))
        self._depth_credit += PROBE_SHARE * float(step_ms[0])
        if self._depth_credit < deep - shallow:
            return False
        self._depth_credit = 0.0
        return True

    def rest(self, steps: int) -> None:
        """Steps went by for which nothing was decided, and nothing drafted."""
        self._steps_since_forward += steps
        self._steps_in_debt += steps * self._is_in_debt

    def observe(
        self,
        # [R] requests that got a forward, by slot, and how deep it went
        slots: Ints,
        reached: Ints,
        # [N] probability, depth and owner (0..R-1) of the nodes there are with the forward
        nodes: tuple[Floats, Ints, Ints],
        # [M] the same of those that lookups had found without it
        found: tuple[Floats, Ints, Ints],
    ) -> None:
        """Learns from what forwards added."""
        num_reqs = len(slots)
        if not num_reqs:
            return
        self._grow(int(slots.max()))
        hints = _hints(found[2], num_reqs)
        new_counts = np.zeros(self._counts.size)
        new_sums = np.zeros(self._counts.size)
        for sign, (probabilities, depths, owners) in ((1.0, nodes), (-1.0, found)):
            inside = depths <= np.minimum(reached, self.deepest)[owners]
            p, d, o = probabilities[inside], depths[inside], owners[inside]
            cell = (hints[o] * self.deepest + d - 1) * _BINS + np.searchsorted(_EDGES, p)
            new_counts += sign * np.bincount(cell, minlength=new_counts.size)
            new_sums += sign * np.bincount(cell, p, new_sums.size)
        # [2, deepest] drafts that reached each depth
        per_depth = np.zeros((2, self.deepest))
        for kind in (0, 1):
            of_kind = reached[hints == kind]
            per_depth[kind] = (of_kind[:, None] > np.arange(self.deepest)).sum(axis=0)

        averages = (self._sums / self._drafts[:, :, None]).sum(axis=2)
        expected = np.cumsum(averages, axis=1)[hints, np.minimum(reached, self.deepest) - 1]
        keep = _DECAY**per_depth
        self._drafts = self._drafts * keep + per_depth
        self._counts = self._counts * keep[:, :, None] + new_counts.reshape(self._counts.shape)
        self._sums = self._sums * keep[:, :, None] + new_sums.reshape(self._sums.shape)
        self._averages = None

        added = np.bincount(nodes[2], nodes[0], num_reqs) - np.bincount(
            found[2], found[0], num_reqs
        )
        decayed = _REQUEST_DECAY
        prior = (1 - decayed) * _REQUEST_PRIOR
        self._found[slots] = decayed * self._found[slots] + prior + np.maximum(added, 0.0)
        self._expected[slots] = decayed * self._expected[slots] + prior + np.maximum(expected, 1e-3)

    def _make_averages(self) -> tuple[Floats, Floats]:
        """[2, depth options, bins] nodes one forward adds, and their probabilities."""
        weights = self._drafts[:, :, None]
        options = self._depth_options - 1
        counts = np.cumsum(self._counts / weights, axis=1)[:, options, ::-1]
        sums = np.cumsum(self._sums / weights, axis=1)[:, options, ::-1]
        return counts, sums

    def reset(self, slot: int) -> None:
        """A new request took this slot."""
        self._grow(slot)
        self._found[slot] = self._expected[slot] = _REQUEST_PRIOR

    def _grow(self, slot: int) -> None:
        while slot >= len(self._found):
            self._found = np.concatenate([self._found, np.full(len(self._found), _REQUEST_PRIOR)])
            self._expected = np.concatenate(
                [self._expected, np.full(len(self._expected), _REQUEST_PRIOR)]
            )
