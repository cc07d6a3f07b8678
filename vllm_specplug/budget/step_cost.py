# SPDX-License-Identifier: Apache-2.0
"""The cost model of a step: verification by rows and context, drafting by rows, other work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specplug.budget import Floats
from vllm_specplug.budget.cost_curve import TREE_FADING, CostCurve

_REST_LEARNING_RATE = 0.05
_FIRST_REST_MS = 1.0

LEVEL_ROWS = 8
"""Fixed cost of one level of a draft, in rows: its weights are read once."""


def draft_rows(requests: npt.ArrayLike, depth: npt.ArrayLike, by_level: bool) -> Floats:
    """Returns the size of a draft forward in rows.

    Args:
        requests: number of requests that draft.
        depth: depth of the draft, averaged over these requests.
        by_level: whether each level is a separate pass. If not, one pass has depth + 1 rows per
            request.
    """
    requests, depth = np.asarray(requests, np.float64), np.asarray(depth, np.float64)
    rows: Floats = depth * (requests + LEVEL_ROWS) if by_level else requests * (depth + 1)
    return rows


@dataclass(frozen=True)
class Calibration:
    """Times measured on this machine before serving."""

    rows: tuple[float, ...]
    """Numbers of rows of the measured forwards."""
    forward_ms: tuple[float, ...]
    """Target forward of that many rows with a short context, without logits."""
    logits_ms: tuple[float, ...]
    """Logits of that many rows."""
    context_ms: float
    """Cost of one more token of context for the first row of a request, over all layers."""
    attention_ms: float
    """The same for every further row of the request. Kernels of GPUs read a context once for all
    rows of a tree."""
    draft_rows: tuple[float, ...]
    draft_ms: tuple[float, ...]
    """Draft forward of that many rows (function `draft_rows`)."""


class StepCostModel:
    """Predicts the milliseconds of the parts of a step, and learns from real steps.

    Args:
        by_level: whether a draft runs one pass per level.
    """

    def __init__(self, calibration: Calibration, by_level: bool = False) -> None:
        self.by_level = by_level
        self.forward = CostCurve(calibration.rows, calibration.forward_ms)
        self.logits = CostCurve(calibration.rows, calibration.logits_ms)
        self.draft = CostCurve(calibration.draft_rows, calibration.draft_ms)
        self.context_ms = calibration.context_ms
        self.attention_ms = calibration.attention_ms
        self.rest_ms = _FIRST_REST_MS
        """Milliseconds of a plain step outside forward and sampling, such as scheduling."""
        self.tree_rest_ms = 0.0
        """Additional milliseconds of a step with trees for the same work."""

    def verify_ms(
        self,
        rows: npt.ArrayLike,
        sampled: npt.ArrayLike,
        context: float,
        more_context: float = 0.0,
        *,
        has_trees: bool = False,
    ) -> Floats:
        """Returns the milliseconds of the target forward and the tree walk.

        Args:
            rows: rows of the forward.
            sampled: rows that need logits.
            context: sum of the tokens attended by the first row of each request.
            more_context: sum of the tokens attended by all other rows.
            has_trees: whether any row is a draft node.
        """
        attention = self.context_ms * context + self.attention_ms * more_context
        plain = self.forward(rows) + self.logits(sampled) + attention
        return plain * self.forward.tree_factor if has_trees else plain

    def decode_ms(
        self,
        roots: int,
        other_rows: int,
        num_nodes: int,
        context: float,
        other_context: float = 0.0,
    ) -> Floats:
        """Returns [num_nodes + 1] ms of a step with 0, 1, ... nodes, without drafting.

        Args:
            roots: rows that are sampled without drafts.
            other_rows: rows that are not sampled.
            context: tokens attended by the roots.
            other_context: tokens attended by the other rows.
        """
        sampled = roots + np.arange(num_nodes + 1)
        milliseconds = self.verify_ms(sampled + other_rows, sampled, context, other_context)
        milliseconds[1:] *= self.forward.tree_factor
        milliseconds[1:] += self.tree_rest_ms
        return milliseconds + self.rest_ms

    def draft_ms(self, requests: npt.ArrayLike, depth: npt.ArrayLike) -> Floats:
        """Returns the milliseconds of a draft forward. Arguments as for `draft_rows`."""
        return self.draft(draft_rows(requests, depth, self.by_level))

    def observe_draft(self, requests: int, depth: float, milliseconds: float) -> None:
        """Learns from a real draft forward."""
        self.draft.observe(float(draft_rows(requests, depth, self.by_level)), milliseconds)

    def observe_verify(
        self,
        rows: int,
        sampled: int,
        context: float,
        milliseconds: float,
        more_context: float = 0.0,
        *,
        has_trees: bool = False,
    ) -> None:
        """Learns from a real step. Its shape is given as for `verify_ms`."""
        expected = float(self.verify_ms(rows, sampled, context, more_context, has_trees=has_trees))
        self.forward.observe(rows, milliseconds, expected, has_trees=has_trees)

    def observe_rest(self, milliseconds: float, *, has_trees: bool = False) -> None:
        """Learns from the time of a real step outside forward, walk and drafting."""
        expected = self.rest_ms + (self.tree_rest_ms if has_trees else 0.0)
        error = _REST_LEARNING_RATE * (min(max(milliseconds, 0.0), 4.0 * expected + 1.0) - expected)
        if not has_trees:
            self.rest_ms += error
            self.tree_rest_ms *= 1.0 - TREE_FADING
            return
        # The last plain step may be long ago, so half of the error may concern plain steps.
        self.rest_ms = max(0.0, self.rest_ms + 0.5 * error)
        self.tree_rest_ms = max(0.0, self.tree_rest_ms + 0.5 * error)
