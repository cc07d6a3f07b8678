# SPDX-License-Identifier: Apache-2.0
"""Predicts the probability that a node is accepted, and learns it while serving.

Drafters score a node with the log-probability of its path. A head overestimates deep nodes, and the
quality of lookups differs between texts. Two corrections use the nodes that the target accepted:

- A table of acceptance rates by depth and score, over all requests. Its prior is that the score is
  the probability. Older observations decay.
- A log-odds offset per request. It starts at zero, is shrunk to zero, and decays as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_specplug.budget import Bools, Floats, Ints

# Log-odds of the scores of the table's columns. They are dense in the range of most decisions.
_LOG_ODDS = np.array([-6.0, -4.5, -3.5, -2.5, -1.75, -1.0, -0.35, 0.35, 1.0, 1.75, 2.75, 4.0, 6.0])
_PRIOR = 1.0 / (1.0 + np.exp(-_LOG_ODDS))
_KNOTS = np.log(_PRIOR)
"""Scores (log-probabilities) of the columns."""
_COLUMNS = len(_KNOTS)

# Row of the table by depth. Deeper nodes share the last row.
_ROW_OF_DEPTH = np.array([0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6])
_ROWS = int(_ROW_OF_DEPTH[-1]) + 1

_PRIOR_WEIGHT = 6.0
"""Weight of the prior of one entry, in observations."""
_TABLE_DECAY = 0.998
"""Decay of earlier observations per step."""

_OFFSET_PRECISION = 4.0
"""Prior precision of an offset: 1 / variance of the offsets of all requests."""
_OFFSET_DECAY = 0.98
"""Decay of a request's earlier evidence per step."""
_OFFSET_LIMIT = 3.0
_PATH_VARIANCE = 2.0
"""Variance of the accepted nodes of a path, relative to independent nodes. A rejected node also
rejects its descendants."""


class AcceptanceModel:
    """Predicts the acceptance probability of nodes by score, depth and request.

    Arrays `slots` identify requests by the results of `slot_of`.
    """

    def __init__(self) -> None:
        self._hits = np.zeros((_ROWS, _COLUMNS))
        self._trials = np.zeros((_ROWS, _COLUMNS))
        self._table = np.empty((_ROWS, _COLUMNS))
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._offsets = np.zeros(64)
        self._precisions = np.full(64, _OFFSET_PRECISION)
        self._refresh()

    def slot_of(self, req_id: str) -> tuple[int, bool]:
        """Returns the slot of a request, and whether the request is new."""
        slot = self._slots.get(req_id)
        is_new = slot is None
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
            if slot == len(self._offsets):
                self._offsets = np.concatenate([self._offsets, np.zeros(slot)])
                self._precisions = np.concatenate(
                    [self._precisions, np.full(slot, _OFFSET_PRECISION)]
                )
            self._slots[req_id] = slot
            self._offsets[slot] = 0.0
            self._precisions[slot] = _OFFSET_PRECISION
        return slot, is_new

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops requests that ended."""
        for req_id in req_ids:
            slot = self._slots.pop(req_id, None)
            if slot is not None:
                self._free.append(slot)

    def probabilities(
        self,
        # [N] cumulative draft log-probabilities
        scores: npt.NDArray[np.floating],
        # [N]
        depths: npt.NDArray[np.integer],
        # [N] each node's request
        slots: npt.NDArray[np.integer],
    ) -> Floats:
        """Returns [N] the probability that each node is accepted with its path.

        Except for rounding, a child is never more probable than its parent.
        """
        return self._predict(*_position(scores, depths), slots)

    def observe(
        self,
        scores: npt.NDArray[np.floating],
        depths: npt.NDArray[np.integer],
        slots: npt.NDArray[np.integer],
        # [N] whether the node's path was accepted
        accepted: Bools,
    ) -> Floats:
        """Learns from the nodes of a verified step. Returns the predicted probabilities [N]."""
        row, left, weight = _position(scores, depths)
        expected = self._predict(row, left, weight, slots)
        hit = accepted.astype(np.float64)

        flat = row * _COLUMNS + left
        both = np.concatenate([flat, flat + 1])
        shares = np.concatenate([1.0 - weight, weight])
        size = _ROWS * _COLUMNS
        self._trials *= _TABLE_DECAY
        self._hits *= _TABLE_DECAY
        self._trials += np.bincount(both, shares, size).reshape(_ROWS, _COLUMNS)
        self._hits += np.bincount(both, shares * np.concatenate([hit, hit]), size).reshape(
            _ROWS, _COLUMNS
        )
        self._refresh()
        self._observe_offsets(slots, hit - expected, expected * (1.0 - expected))
        return expected

    def _observe_offsets(
        self, slots: npt.NDArray[np.integer], residuals: Floats, variances: Floats
    ) -> None:
        size = len(self._offsets)
        seen = np.bincount(slots, minlength=size) > 0
        residual = np.bincount(slots, residuals, size)[seen] / _PATH_VARIANCE
        information = np.bincount(slots, variances, size)[seen] / _PATH_VARIANCE
        precision = _OFFSET_DECAY * self._precisions[seen] + (1 - _OFFSET_DECAY) * _OFFSET_PRECISION
        precision += information
        offset = _OFFSET_DECAY * self._offsets[seen] + residual / precision
        self._precisions[seen] = precision
        self._offsets[seen] = np.clip(offset, -_OFFSET_LIMIT, _OFFSET_LIMIT)

    def _predict(
        self, row: Ints, left: Ints, weight: Floats, slots: npt.NDArray[np.integer]
    ) -> Floats:
        low, high = self._table[row, left], self._table[row, left + 1]
        base = low + (high - low) * weight
        odds = np.exp(self._offsets)[slots]
        return base * odds / (1.0 - base + base * odds)

    def _refresh(self) -> None:
        table = (self._hits + _PRIOR_WEIGHT * _PRIOR) / (self._trials + _PRIOR_WEIGHT)
        # The table must not fall with the score or rise with the depth, so no child exceeds its
        # parent. By score, the mean of both monotone envelopes avoids a bias. By depth the lower
        # envelope is used, because deep entries may still be the prior.
        rising = np.maximum.accumulate(table, axis=1)
        rising += np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
        self._table = np.minimum.accumulate(rising, axis=0) / 2.0


def _position(
    scores: npt.NDArray[np.floating], depths: npt.NDArray[np.integer]
) -> tuple[Ints, Ints, Floats]:
    """Returns the table entries of nodes: row, left column, weight of the right column."""
    column = np.interp(scores, _KNOTS, np.arange(_COLUMNS))
    left = np.minimum(column.astype(np.int64), _COLUMNS - 2)
    row = _ROW_OF_DEPTH[np.minimum(depths, len(_ROW_OF_DEPTH) - 1)]
    return row, left, column - left


def accepted_nodes(paths: Sequence[Sequence[int]], counts: Sequence[int]) -> Bools:
    """Returns [sum of counts] whether each node is on its tree's path, for trees of `counts`
    nodes."""
    flags = np.zeros(sum(counts), np.bool_)
    first = 0
    for path, count in zip(paths, counts, strict=True):
        flags[[first + node for node in path]] = True
        first += count
    return flags
