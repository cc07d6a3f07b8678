# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens: torch's, whatever lies in the rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.kernels import row_argmax
from vllm_specplug.kernels.extension import has_cpu_extension

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])


@DTYPES
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1023, 1024, 1025, 5000, 49152])
def test_equals_torchs(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    rows = torch.randn(9, size).to(dtype)
    # Few distinct values: most maxima have equals, in chunks of their own or beside each other.
    rows[3:6] = (rows[3:6] * 2).round()
    rows[6] = -math.inf
    rows[7] = 0.0
    rows[8] = torch.where(torch.rand(size) < 0.5, 0.0, -0.0).to(dtype)
    assert torch.equal(row_argmax(rows), rows.argmax(dim=-1))


@DTYPES
@given(data=st.data())
def test_what_is_not_a_number_wins_as_in_torch(dtype: torch.dtype, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 2100))
    torch.manual_seed(size)
    rows = torch.randn(3, size).to(dtype)
    for value in (math.nan, math.inf, -math.inf):
        for place in data.draw(st.lists(st.integers(0, size - 1), max_size=3)):
            rows[1, place] = value
    assert torch.equal(row_argmax(rows), rows.argmax(dim=-1))


def test_rows_that_do_not_lie_together() -> None:
    rows = torch.randn(6, 200)[:, ::2]
    assert torch.equal(row_argmax(rows), rows.argmax(dim=-1))
    assert row_argmax(torch.empty(0, 8)).tolist() == []


@pytest.mark.skipif(not has_cpu_extension(), reason="the kernels are not compiled")
def test_the_operator_refuses_what_does_not_fit() -> None:
    call = torch.ops.specplug.row_argmax.default
    rows, indices = torch.randn(3, 8), torch.empty(3, dtype=torch.int64)
    call(rows, indices)
    assert torch.equal(indices, rows.argmax(dim=-1))
    for bad in (
        (rows.double(), indices), (rows[:, ::2], indices), (rows[0], indices),
        (torch.empty(3, 0), indices), (rows, indices[:2]), (rows, indices.int()),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="row_argmax"):
            call(*bad)
