# SPDX-License-Identifier: Apache-2.0
"""Prefix part and tree part, merged by log-sum-exp, are the single-pass tree attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.paged import PagedTrees, layout_of, num_threads, random_parents
from vllm_specplug.kernels import ancestor_words, merge_attn, prefix_attn, reference, tree_part_attn
from vllm_specplug.kernels.extension import has_cpu_extension

DTYPES = {torch.float32: ("vec", 2e-5), torch.bfloat16: ("vnni", 2e-2)}


def _trees(sizes: list[tuple[int, int]], seed: int) -> list[tuple[int, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(context, random_parents(nodes, rng)) for context, nodes in sizes]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        [(0, 1), (1, 0), (31, 2)],
        [(0, 0), (0, 63), (32, 64)],
        [(33, 65), (500, 1), (64, 17)],
        [(1030, 40), (7, 256)],
    ],
)
def test_parts_merge_to_the_whole(sizes, dtype: torch.dtype, threads: int) -> None:
    kind, tolerance = DTYPES[dtype]
    layout = layout_of(kind, dtype, 32, 64)
    case = PagedTrees(layout, 2, 3, _trees(sizes, 5), dense=True)
    key_cache, value_cache = layout.views(case.cache)
    meta = case.metadata(ancestor_words([parents for _, parents in case.trees]))
    query = case.query
    output, other = torch.full_like(query, 7.0), torch.full_like(query, float("nan"))
    lse = torch.full(query.shape[:2], 7.0)
    other_lse = torch.full(query.shape[:2], float("-inf"))
    with num_threads(threads):
        prefix_attn(query, key_cache, value_cache, output, lse, meta, case.scale, layout)
    tree_part_attn(query, case.tail_key, case.tail_value, other, other_lse, meta, case.scale)
    for r, (context, _) in enumerate(case.trees):
        rows = slice(case.row_start[r], case.row_start[r] + case.rows[r])
        if context == 0:
            assert torch.equal(output[rows], torch.zeros_like(output[rows]))
            assert lse[rows].isneginf().all()
        else:
            assert lse[rows].isfinite().all()
    tree_rows = case.tree_rows(torch.arange(len(lse)))
    outside = torch.ones(len(lse), dtype=torch.bool)
    outside[tree_rows] = False
    assert (output[outside] == 7.0).all() and (lse[outside] == 7.0).all()
    merge_attn(output, lse, other, other_lse)
    torch.testing.assert_close(
        case.tree_rows(output).double(), case.expected(), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_prefix_equals_the_reference(dtype: torch.dtype) -> None:
    assert has_cpu_extension(), "the compiled kernels are under test"
    kind, tolerance = DTYPES[dtype]
    layout = layout_of(kind, dtype, 64, 64)
    case = PagedTrees(layout, 3, 3, _trees([(0, 3), (129, 5), (2000, 30)], 9), dense=True)
    key_cache, value_cache = layout.views(case.cache)
    meta = case.metadata(ancestor_words([parents for _, parents in case.trees]))
    results = []
    for run in (prefix_attn, reference.prefix_attn_reference):
        output = torch.zeros_like(case.query)
        lse = torch.zeros(case.query.shape[:2])
        run(case.query, key_cache, value_cache, output, lse, meta, case.scale, layout)
        results.append((output.double(), lse))
    (out_a, lse_a), (out_b, lse_b) = results
    torch.testing.assert_close(out_a, out_b, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse_a, lse_b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_tree_part_equals_the_reference(dtype: torch.dtype) -> None:
    assert has_cpu_extension(), "the compiled kernels are under test"
    kind, tolerance = DTYPES[dtype]
    trees = _trees([(5, 3), (40, 0), (100, 130)], 2)
    case = PagedTrees(layout_of(kind, dtype, 32, 64), 3, 3, trees, dense=True)
    meta = case.metadata(ancestor_words([parents for _, parents in trees]))
    results = []
    for run in (tree_part_attn, reference.tree_part_attn_reference):
        output, lse = torch.zeros_like(case.query), torch.zeros(case.query.shape[:2])
        run(case.query, case.tail_key, case.tail_value, output, lse, meta, case.scale)
        results.append((output.double(), lse))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_is_attention_over_both_sets_of_keys(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, key, value = normal(6, 4, 32), normal(50, 2, 32), normal(50, 2, 32)
    whole, whole_lse = reference.dense_attention(query, key, value, 0.3, 2, None)
    for cut in (0, 1, 25, 50):
        a, lse_a = reference.dense_attention(query, key[:cut], value[:cut], 0.3, 2, None)
        b, lse_b = reference.dense_attention(query, key[cut:], value[cut:], 0.3, 2, None)
        out, lse = a.to(dtype), lse_a.contiguous()
        merge_attn(out, lse, b.to(dtype), lse_b)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.float(), whole, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)


def test_a_side_without_keys_changes_nothing_whatever_it_holds() -> None:
    out, lse = torch.randn(3, 2, 16), torch.randn(3, 2)
    before, lse_before = out.clone(), lse.clone()
    nothing = torch.full((3, 2), float("-inf"))
    merge_attn(out, lse, torch.full_like(out, float("nan")), nothing)
    assert torch.equal(out, before) and torch.equal(lse, lse_before)
    rubbish, empty = torch.full_like(out, float("nan")), nothing.clone()
    merge_attn(rubbish, empty, before, lse_before)
    assert torch.equal(rubbish, before) and torch.equal(empty, lse_before)
