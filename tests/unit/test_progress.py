# SPDX-License-Identifier: Apache-2.0
"""Progress bars of long commands."""

import pytest

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
