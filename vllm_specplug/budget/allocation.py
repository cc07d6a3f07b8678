# SPDX-License-Identifier: Apache-2.0
"""Finds the set of nodes with the most expected tokens per millisecond, exactly.

A step that verifies a set S of nodes yields R + sum of p_i over S tokens on average: one token of
the target per request, and each node with its probability of acceptance. The step takes
C(|S|) + sum of a_i over S milliseconds. C is any function of the number of nodes. a_i is the
additional cost of node i, such as attention to the context of its request. The best S has the
highest ratio.

For a fixed rate r, the S that maximises tokens - r * milliseconds consists of the n best nodes by
p_i - r * a_i, for some n. One sort and one pass over n find it for any C. Dinkelbach's iteration
(W. Dinkelbach, On nonlinear fractional programming, 1967) sets r to the ratio reached and repeats
until r no longer changes. It ends at the best ratio after two or three rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vllm_specplug.budget import Bools, Floats, Ints

_MAX_ROUNDS = 8


@dataclass(frozen=True)
class Allocation:
    """The nodes that a step should verify."""

    order: Ints
    """[N] all nodes, the best first."""
    tokens_of: Floats
    """[N + 1] expected tokens of a step with the best 0, 1, ... nodes."""
    ms_of: Floats
    """[N + 1] milliseconds of that step."""
    count: int
    """Number of nodes to verify."""

    @property
    def kept(self) -> Bools:
        """[N] True for the nodes to verify."""
        kept = np.zeros(len(self.order), np.bool_)
        kept[self.order[: self.count]] = True
        return kept

    @property
    def tokens(self) -> float:
        """Expected tokens of the step."""
        return float(self.tokens_of[self.count])

    @property
    def milliseconds(self) -> float:
        """Milliseconds of the step."""
        return float(self.ms_of[self.count])

    @property
    def rate(self) -> float:
        """Expected tokens per millisecond."""
        return self.tokens / self.milliseconds

    def with_count(self, count: int) -> Allocation:
        """Returns the allocation of the best `count` nodes."""
        return replace(self, count=count)


def allocate(
    # [N] probability that each node is accepted, at most its parent's
    probabilities: Floats,
    # [N + 1]: ms of a step that verifies n nodes; [0] is the plain step
    step_ms: Floats,
    base_tokens: float,
    # [N] additional ms of each node
    node_ms: Floats,
) -> Allocation:
    """Returns the nodes with the most expected tokens per millisecond.

    Parents must come before their children, and nodes of one tree must have equal `node_ms`. Then
    no node is kept without its ancestors, which are at least as probable and win ties. Of several
    best choices, the one with the fewest nodes is returned.
    """
    assert len(step_ms) == len(probabilities) + 1 and base_tokens > 0

    def best_at(rate: float) -> Allocation:
        order = np.argsort(rate * node_ms - probabilities, kind="stable")
        tokens = np.concatenate(([base_tokens], probabilities[order])).cumsum()
        milliseconds = np.concatenate(([0.0], node_ms[order])).cumsum() + step_ms
        count = int((tokens - rate * milliseconds).argmax())
        return Allocation(order, tokens, milliseconds, count)

    rate = base_tokens / float(step_ms[0])
    best = best_at(rate)
    if best.rate <= rate * (1 + 1e-12):
        return best.with_count(0)
    for _ in range(_MAX_ROUNDS - 1):
        found = best_at(best.rate)
        if found.rate <= best.rate * (1 + 1e-12):
            break
        best = found
    return best
