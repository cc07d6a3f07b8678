# SPDX-License-Identifier: Apache-2.0
"""Which nodes are worth their rows: the most expected tokens per millisecond, exactly.

A step that verifies the nodes S of all its requests yields, on average, R + sum of p_i over S
tokens: one of the target's own per request, and for every node its probability of being accepted.
It takes C(|S|) + sum of a_i over S milliseconds, where C is any curve over the number of nodes
(flat up to some rows, stairs, linear) and a_i is what node i costs by itself, such as the
attention over its request's context. Wanted is the S with the best ratio.

For a fixed rate r, the S that maximises tokens - r * milliseconds contains the n best nodes by
p_i - r * a_i for some n, so sorting and one pass over n find it whatever the curve. Dinkelbach's
iteration (W. Dinkelbach, On nonlinear fractional programming, 1967) sets r to the ratio reached
and repeats until it stays; it ends at the best ratio, after two or three rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_MAX_ROUNDS = 8


@dataclass(frozen=True)
class Allocation:
    """The nodes a step should verify."""

    kept: npt.NDArray[np.bool_]
    """[N] True for the nodes that pay."""
    tokens: float
    """Expected tokens of the step."""
    milliseconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per millisecond."""
        return self.tokens / self.milliseconds


def allocate(
    # [N] each node's probability of being accepted, not larger than its parent's
    probabilities: Floats,
    # [N + 1] or longer, ms of a step that verifies n nodes; [0] is the plain step
    step_ms: Floats,
    base_tokens: float,
    # [N] ms of each node by itself, None for none
    node_ms: Floats | None = None,
) -> Allocation:
    """The nodes with the best expected tokens per millisecond.

    Nodes must be given parents first. Nodes of one tree must have equal `node_ms`, then a node is
    never kept without its ancestors: these are at least as probable, and come first in a tie.
    Of several best choices the one with the fewest nodes is taken.
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
