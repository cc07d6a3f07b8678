# SPDX-License-Identifier: Apache-2.0
"""Trees of which two rows hold what is not finite."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tests.kernels.tree_problem import TreeProblem

# Contexts within a tile, at its end and none; row 2 has descendants (4, 6, 7), row 3 has none.
TREES = [(c, np.array([-1, -1, 0, 1, 0, 3, 3, 4], np.int32)) for c in (21, 64, 0, 300)]
BAD_ROWS, ATTEND_THEM = (2, 3), {2, 3, 4, 6, 7}
Store = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def as_it_is(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key, value


def spoil(key: torch.Tensor, value: torch.Tensor, row: int, number: float) -> None:
    """All of one head's value and one number of another's; of a key, one number."""
    value[row, 0] = number
    value[row, -1, 3] = -number
    if row == BAD_ROWS[0]:
        key[row, 0, 5] = number


def check_rows(clean: torch.Tensor, spoilt: torch.Tensor) -> None:
    """Rows of one tree [n, Hq, Dh] without and with what spoils some."""
    for row in range(len(clean)):
        if row in ATTEND_THEM:
            # In the first head and, of the last one, where the value is.
            assert not spoilt[row, 0].isfinite().any(), f"row {row} does not see its ancestor"
            assert not spoilt[row, -1].isfinite().all(), f"row {row} does not see its ancestor"
        else:
            assert torch.equal(clean[row], spoilt[row]), f"row {row} sees a row of another branch"


def check_spoilt(
    problem: TreeProblem,
    store: Store,
    answer: Callable[[], torch.Tensor],
    number: float = float("nan"),
) -> None:
    """Raises unless `number`, in two rows of each tree of `TREES`, reaches the rows that attend
    them and no other."""
    clean = answer()
    for r, context in enumerate(problem.contexts):
        key, value = problem.keys[r][context:], problem.values[r][context:]
        for row in BAD_ROWS:
            spoil(key, value, row, number)
        slots = problem.slots(r, context + len(key))[context:]
        problem.store(slots, *store(key, value))
    rows = zip(*(problem.tree_rows(output) for output in (clean, answer())), strict=True)
    for before, after in rows:
        check_rows(before, after)
