# SPDX-License-Identifier: Apache-2.0
"""A made-up calibration."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specplug.budget.step_cost import Calibration

ROWS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0)


# Flat to eight rows, then steeper: the shape of a small model on few cores.
TIMES = (25.0, 27.0, 40.0, 62.0, 110.0, 205.0)


def calibration(
    times: Sequence[float] = TIMES, draft: float = 0.3, attention_ms: float = 1e-4
) -> Calibration:
    return Calibration(
        rows=ROWS,
        forward_ms=tuple(times),
        logits_ms=tuple(0.05 * r for r in ROWS),
        context_ms=attention_ms,
        attention_ms=attention_ms,
        draft_rows=(1.0, 100.0),
        draft_ms=(draft, 100 * draft),
    )
