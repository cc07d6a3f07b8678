# SPDX-License-Identifier: Apache-2.0
"""Finds the exact set of nodes with the most expected tokens per millisecond.

A step that verifies a set S of nodes yields R + sum of p_i over S tokens on average: one token of
the target per request, and each node with its probability of acceptance. The step takes
C(|S|) + sum of a_i over S milliseconds. C is any function of the number of nodes. a_i is the
additional cost of node i, such as attention to the context of its request. The best S has the
highest ratio.

For a fixed rate r, the S that maximises tokens - r * milliseconds consists of the n best nodes by
p_i - r * a_i, for some n. One sort and one pass over n find it for any C. Dinkelbach's iteration
(W. Dinkelbach, On nonlinear fractional programming, 1967) sets r to the ratio reached and repeats
until r stays the same. It ends at the best ratio after two or three rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget.arrays import Bools, Floats

_MAX_ROUNDS = 8


@dataclass(frozen=True)
class Allocation:
    """The nodes that a step should verify."""

    kept: Bools
    """[N] True for the nodes to verify."""
    tokens: float
    """Expected tokens of the step."""
    milliseconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per millisecond."""
        return self.tokens / self.milliseconds


def allocate(
    # [N] probability that each node is accepted, not larger than that of its parent
    probabilities: Floats,
    # [N + 1] or longer: ms of a step that verifies n nodes; [0] is the plain step
    step_ms: Floats,
    base_tokens: float,
    # [N] additional ms of each node; None for none
    node_ms: Floats | None = None,
) -> Allocation:
    """Returns the nodes with the most expected tokens per millisecond.

    Parents must come before their children, and nodes of one tree must have equal `node_ms`. Then
    no node is kept without its ancestors, which are at least as probable and win ties. Of several
    best choices, the one with the fewest nodes is returned.
    """
    num_nodes = len(probabilities)
    assert len(step_ms) > num_nodes and base_tokens > 0
    tokens = np.empty(num_nodes + 1)
    tokens[0] = base_tokens
    kept = np.zeros(num_nodes, np.bool_)
    if node_ms is None or not node_ms.any():
        order = np.argsort(-probabilities, kind="stable")
        np.cumsum(probabilities[order], out=tokens[1:])
        tokens[1:] += base_tokens
        count = int(np.argmax(tokens / step_ms[: num_nodes + 1]))
        kept[order[:count]] = True
        return Allocation(kept, float(tokens[count]), float(step_ms[count]))

    rate = base_tokens / float(step_ms[0])
    milliseconds = np.empty(num_nodes + 1)
    best = (float(base_tokens), float(step_ms[0]), np.empty(0, np.int64))
    for _ in range(_MAX_ROUNDS):
        order = np.argsort(rate * node_ms - probabilities, kind="stable")
        np.cumsum(probabilities[order], out=tokens[1:])
        tokens[1:] += base_tokens
        milliseconds[0] = 0.0
        np.cumsum(node_ms[order], out=milliseconds[1:])
        milliseconds += step_ms[: num_nodes + 1]
        count = int(np.argmax(tokens - rate * milliseconds))
        reached = float(tokens[count] / milliseconds[count])
        if reached <= rate * (1 + 1e-12):
            break
        rate = reached
        best = (float(tokens[count]), float(milliseconds[count]), order[:count])
    kept[best[2]] = True
    return Allocation(kept, best[0], best[1])
