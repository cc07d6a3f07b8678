# SPDX-License-Identifier: Apache-2.0
"""Triton's kernel over latent rows in Triton's interpreter, against an oracle in float64 that knows
neither masks nor pages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.latent_trees import LatentTrees
from tests.kernels.spoilt_rows import BAD_ROWS, TREES, check_rows
from vllm_specplug.kernels import TreeAttnMetadata, latent_attn_triton
from vllm_specplug.kernels.finite_values_triton import store_isolated_triton
from vllm_specplug.kernels.latent_attn_triton import choose_config, self_test

pytestmark = pytest.mark.usefixtures("interpreter")

FP16 = torch.float16


@pytest.mark.parametrize("nodes", [0, 1, 62, 63, 64, 65])
def test_node_counts_around_word_edges(nodes: int) -> None:
    LatentTrees([(19, nodes), (3, 1)]).check()


def test_largest_tree() -> None:
    LatentTrees([(20, 256)], heads=1).check()


@pytest.mark.parametrize("page", [16, 64, 128])
def test_context_lengths_around_block_edges(page: int) -> None:
    LatentTrees([(c, 3) for c in (0, 1, 15, 16, 17, 63, 64, 65)], page=page, heads=1).check()


@pytest.mark.parametrize("splits", [2, 3])
def test_splits_are_merged_and_short_contexts_leave_some_empty(splits: int) -> None:
    LatentTrees([(530, 5), (3, 2), (0, 9), (257, 0)], heads=1).check(splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_trees_without_rows_are_skipped(splits: int) -> None:
    LatentTrees([(300, 5), (3, 2)], heads=1).check(splits=splits, skipped=3)


@pytest.mark.parametrize(("heads", "latent", "rotary"), [(16, 512, 64), (2, 256, 64), (5, 48, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, FP16])
def test_shapes_of_targets(dtype: torch.dtype, heads: int, latent: int, rotary: int) -> None:
    specs = [(33, 9), (0, 2), (280, 3)]
    LatentTrees(specs, dtype=dtype, heads=heads, latent=latent, rotary=rotary).check(splits=2)


def _wrong_ancestor(meta: TreeAttnMetadata) -> None:
    assert meta.mask_words is not None
    meta.mask_words[5] ^= 2


def _wrong_context(meta: TreeAttnMetadata) -> None:
    meta.plan[3] -= 1


def _wrong_request(meta: TreeAttnMetadata) -> None:
    meta.plan[0] = meta.plan[0].flip(0)


@pytest.mark.parametrize("damage", [_wrong_ancestor, _wrong_context, _wrong_request])
def test_the_check_notices(damage: Callable[[TreeAttnMetadata], None]) -> None:
    with pytest.raises(AssertionError, match="off by|unused slot"):
        LatentTrees([(40, 8), (41, 3)], heads=1).check(damage=damage)


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
    for isolated in (True, False):
        problem = LatentTrees([(c, len(p)) for c, p in TREES], heads=2)
        problem.parents = [p for _, p in TREES]
        clean = problem.answer()
        pages, size = problem.cache.unsqueeze(2), problem.latent
        page = problem.cache.shape[1]
        for r, context in enumerate(problem.contexts):
            for row in BAD_ROWS:
                token = problem.stored[r][context + row].clone()
                token[[0, 7]] = torch.nan
                at = context + row
                slot = int(problem.block_table[r + 1, at // page]) * page + at % page
                if isolated:
                    store_isolated_triton(
                        token[None, None, size:], token[None, None, :size], pages[..., size:],
                        pages[..., :size], torch.tensor([slot]),
                    )  # fmt: skip
                else:
                    problem.slot(r, at).copy_(token)
        spoilt = problem.answer()
        for start, n in zip(problem.starts, problem.rows, strict=True):
            rows = slice(start, start + n)
            if isolated:
                check_rows(clean[rows], spoilt[rows])
                continue
            with pytest.raises(AssertionError, match="sees a row of another branch"):
                check_rows(clean[rows], spoilt[rows])


def test_the_check_at_start_notices_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
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
