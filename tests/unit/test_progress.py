# SPDX-License-Identifier: Apache-2.0
"""Progress bars of long commands."""

import io

import pytest
from rich.console import Console

from vllm_specplug.progress import progress


def test_a_task_whose_steps_take_minutes_has_a_rate_and_a_remaining_time() -> None:
    bar, now = progress(), [0.0]
    bar.get_time = lambda: now[0]
    task = bar.add_task("answers", total=4)
    for done in (1, 2):
        now[0] += 100
        bar.update(task, completed=done)
    assert bar.tasks[0].speed == pytest.approx(0.01)
    assert bar.tasks[0].time_remaining == 200


def test_a_log_gets_a_line_per_minute() -> None:
    out, now = io.StringIO(), [100.0]
    bar = progress(Console(file=out))
    bar.get_time = lambda: now[0]
    task = bar.add_task("tokens", total=9_000_000)
    for _ in range(9):
        now[0] += 25
        bar.advance(task, 1_000_000)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and all("tokens" in line for line in lines)
    assert "1000000/9000000" in lines[0] and "40,000.0/s" in lines[1], lines
