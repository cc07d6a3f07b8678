# SPDX-License-Identifier: Apache-2.0
"""Trees shrink with the batch and stop where they are not worth drafting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.options import RowBudget


@given(st.integers(1, 256), st.integers(1, 4096), st.integers(1, 512))
def test_never_exceeds_rows_or_nodes(nodes: int, rows: int, requests: int) -> None:
    share = RowBudget(nodes, rows, rows, 1).nodes_per_request(requests)
    assert 0 <= share <= nodes
    assert share == 0 or requests * (share + 1) <= rows


def test_shrinks_then_stops() -> None:
    budget = RowBudget(16, 32, 32, 1)
    assert [budget.nodes_per_request(n) for n in (0, 1, 2, 4, 8, 10, 11, 64)] == [
        0, 16, 15, 7, 3, 2, 0, 0,
    ]  # fmt: skip
    assert RowBudget(1, 8, 8, 1).nodes_per_request(1) == 1


def test_requests_that_fill_the_scheduler_leave_room_for_one_more() -> None:
    def nodes(requests: int, most: int) -> int:
        budget = RowBudget(64, max_step_rows=256, scheduler_rows=256, max_requests=most)
        return budget.share(requests)

    assert nodes(8, 16) == 256 // 9 - 1
    assert 8 * (nodes(8, 16) + 1) <= 256 - nodes(8, 16) - 1
    assert nodes(8, 8) == 256 // 8 - 1, "there is nobody else to wait"
    small = RowBudget(64, max_step_rows=32, scheduler_rows=256, max_requests=16)
    assert small.share(8) == 3, "the smaller limit holds"
