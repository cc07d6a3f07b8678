# SPDX-License-Identifier: Apache-2.0
"""Attention over a request's paged context and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged import chain_attention, num_threads, paged_trees
from vllm_specplug.kernels import prefix_attn
from vllm_specplug.kernels.reference import prefix_attn_reference

DTYPES = {
    torch.float32: ("vec", 2e-5),
    torch.float16: ("vec", 2e-3),
    torch.bfloat16: ("vnni", 2e-2),
}


@pytest.mark.parametrize("run", [prefix_attn, prefix_attn_reference])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [32, 64])
def test_rows_see_the_context_and_nothing_else(run, threads, dtype, block_size, compiled) -> None:
    kind, tolerance = DTYPES[dtype]
    specs = [(0, 3), (1, 0), (31, 2), (33, 65), (500, 4)]
    case = paged_trees(specs, (dtype, kind), page=block_size, head=64, group=3, dense=True)
    layout, meta = case.layout, case.metadata()
    output = torch.full_like(case.query, 7.0)
    lse = torch.full(case.query.shape[:2], 7.0)
    with num_threads(threads):
        run(case.query, *layout.views(case.cache), output, lse, meta, case.scale, layout)
    for r, (context, _) in enumerate(case.trees):
        rows = slice(case.row_start[r], case.row_start[r] + case.rows[r])
        if context == 0:
            assert (output[rows] == 0.0).all() and lse[rows].isneginf().all()
        else:
            key, value = case.keys[r][:context], case.values[r][:context]
            expected = [chain_attention(q, key, value, case.scale) for q in case.query[rows]]
            torch.testing.assert_close(
                output[rows].double(), torch.stack(expected), atol=tolerance, rtol=tolerance
            )
            wide = key.double().repeat_interleave(3, dim=1)
            scores = torch.einsum("ihd,jhd->ihj", case.query[rows].double(), wide) * case.scale
            torch.testing.assert_close(
                lse[rows].double(), scores.logsumexp(-1), atol=tolerance, rtol=tolerance
            )
        output[rows], lse[rows] = 7.0, 7.0
    assert (output == 7.0).all() and (lse == 7.0).all(), "a row of no tree was written"
