# SPDX-License-Identifier: Apache-2.0
"""What one row's keys and values hold reaches the rows that attend it and no other, in every kernel
that reads the cache: NaN and infinity among siblings leave all others as they are without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.paged import PagedTrees, paged_trees
from tests.kernels.spoilt_rows import TREES, Store, as_it_is, check_spoilt
from vllm_specplug.kernels import AttnFeatures, isolate_nonfinite, tree_attn
from vllm_specplug.kernels.reference import tree_attn_reference

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")


def check_paged(
    run: Callable[..., None], problem: PagedTrees, number: float, store: Store, splits: int = 1
) -> None:
    problem.check(kernel=run, splits=splits)
    check_spoilt(problem, store, lambda: problem.answer(kernel=run, splits=splits), number)


def paged(dtype: torch.dtype, kind: str, **options: Any) -> PagedTrees:
    return paged_trees(TREES, (dtype, kind), group=3, **options)


@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(FP32, "vec"), (FP16, "vec"), (BF16, "vec"), (BF16, "vnni"), (FP32, "table")],
)
def test_on_every_instruction_set(isa: str, dtype: torch.dtype, kind: str, number: float) -> None:
    check_paged(tree_attn, paged(dtype, kind), number, isolate_nonfinite)


@pytest.mark.parametrize(
    "features",
    [AttnFeatures(window=30), AttnFeatures(soft_cap=2.0), AttnFeatures(sinks=torch.randn(6)),
     AttnFeatures(alibi_slopes=torch.rand(6))],
    ids=["window", "soft cap", "sinks", "alibi"],
)  # fmt: skip
@pytest.mark.parametrize("run", [tree_attn, tree_attn_reference])
def test_in_layers_with_features(
    compiled: None, run: Callable[..., None], features: AttnFeatures
) -> None:
    check_paged(run, paged(FP32, "vec", features=features), NAN, isolate_nonfinite)


def test_in_shares_of_a_split_context(compiled: None) -> None:
    """A row's ancestor may be in the share that is merged with weight 0."""
    check_paged(tree_attn, paged(FP32, "vec"), NAN, isolate_nonfinite, splits=4)


@pytest.mark.parametrize("run", [tree_attn, tree_attn_reference])
def test_stored_as_they_are_they_reach_other_branches(
    compiled: None, run: Callable[..., None]
) -> None:
    with pytest.raises(AssertionError, match="sees a row of another branch"):
        check_paged(run, paged(FP32, "vec"), NAN, as_it_is)


def test_what_is_finite_is_not_copied() -> None:
    for dtype in (FP32, FP16, BF16, torch.float64):
        key, value = torch.zeros(2, 4, 2, 8, dtype=dtype)
        value[1, 1, 3] = torch.finfo(dtype).max
        assert [x is y for x, y in zip(isolate_nonfinite(key, value), (key, value), strict=True)]
        assert isolate_nonfinite(key, value)[1] is value
        value[3, 0, 7] = -INF
        stored_key, stored_value = isolate_nonfinite(key, value)
        assert stored_key[3, 0].isnan().all() and stored_key.isnan().sum() == 8
        assert stored_value[3, 0, 7] == 0 and value[3, 0, 7] == -INF and not key.isnan().any()
        # A part of a wider row, as of a joint projection.
        wide = torch.zeros(4, 6, 8, dtype=dtype)
        wide[2, 5, 0] = NAN
        assert isolate_nonfinite(wide[:, :2], wide[:, 2:4])[1] is not None
        assert isolate_nonfinite(wide[:, 2:4], wide[:, 4:])[0][2, 1].isnan().all()
