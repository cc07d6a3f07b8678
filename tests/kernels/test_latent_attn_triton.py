# SPDX-License-Identifier: Apache-2.0
"""Triton's kernel over latent rows in Triton's interpreter, against an oracle in float64 that knows
neither masks nor pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_suite import Specs, TreeSuite
from tests.kernels.device_trees import FP16, FP32, LatentTrees
from tests.kernels.spoilt_rows import TREES, as_it_is, check_spoilt
from vllm_specplug.kernels import latent_attn_triton
from vllm_specplug.kernels.finite_values_triton import store_isolated_triton
from vllm_specplug.kernels.latent_attn_triton import choose_config, self_test

pytestmark = pytest.mark.usefixtures("interpreter")


class TestTrees(TreeSuite):
    narrow = {"heads": 1}

    def problem(self, specs: Specs, **options: Any) -> LatentTrees:
        return LatentTrees(specs, **options)


@pytest.mark.parametrize(("heads", "latent", "rotary"), [(16, 512, 64), (2, 256, 64), (5, 48, 8)])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_shapes_of_targets(dtype: torch.dtype, heads: int, latent: int, rotary: int) -> None:
    specs = [(33, 9), (0, 2), (180, 3)]
    LatentTrees(specs, dtype=dtype, heads=heads, latent=latent, rotary=rotary).check(splits=2)


def test_the_check_notices_a_wrong_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the parts of a split tree."""
    problem = LatentTrees([(530, 5)], heads=1)
    problem.check(splits=2)
    merge = latent_attn_triton.merge_parts

    def in_base_2(out: torch.Tensor, lse: torch.Tensor, *rest: object, **more: object) -> None:
        merge(out, lse / np.log(2), *rest, **more)

    monkeypatch.setattr(latent_attn_triton, "merge_parts", in_base_2)
    with pytest.raises(AssertionError, match="off by"):
        problem.check(splits=2)


def test_what_is_not_finite_reaches_those_who_attend_it() -> None:
    def isolated(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size, rows = value.shape[2], torch.empty_like(key)[None]
        parts = (key[..., size:], key[..., :size], rows[..., size:], rows[..., :size])
        store_isolated_triton(*parts, torch.arange(len(key)))
        return rows[0], rows[0, ..., :size]

    problem = LatentTrees(TREES, heads=2)
    check_spoilt(problem, isolated, problem.answer)
    problem = LatentTrees(TREES, heads=2)
    with pytest.raises(AssertionError, match="sees a row of another branch"):
        check_spoilt(problem, as_it_is, problem.answer)


def test_the_check_at_start_notices_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # The long tree is for a device.
    monkeypatch.setattr(latent_attn_triton, "_TEST_TREES", ((0, 0), (33, 8), (90, 3)))
    like = torch.empty(0, 16, 48)
    assert self_test(like, 32, 2) < 1e-5
    words = latent_attn_triton.tree_words
    monkeypatch.setattr(latent_attn_triton, "tree_words", lambda meta: words(meta) | 2)
    with pytest.raises(RuntimeError, match=r"differs .*\(2 heads over rows of 32 \+ 16"):
        self_test(like, 32, 2)


def test_tiles_fit_the_smallest_shared_memory() -> None:
    """Of a device of compute capability 8.6 or 8.9."""
    for rows in (1, 16, 17, 257 * 128):
        for itemsize in (2, 4):
            config = choose_config(rows, itemsize)
            # Of three stages the compiler keeps one beside the tile in use.
            assert (config.block_m + config.block_n) * 576 * itemsize + 4096 <= 99 * 1024
            assert 64 % config.block_n == 0
