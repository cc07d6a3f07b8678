# SPDX-License-Identifier: Apache-2.0
"""Key scores, against plain products."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged import layout_of
from vllm_specplug.kernels import key_scores

BLOCKS, HEADS, BLOCK, DIM = 5, 2, 32, 32


@pytest.mark.parametrize(
    "kind", [("vec", torch.float32), ("vnni", torch.bfloat16), ("table", torch.float32)]
)
def test_scores_are_sums_over_the_query_group(kind) -> None:
    layout = layout_of(*kind, BLOCK, DIM)
    cache = torch.randn(BLOCKS, HEADS, BLOCK, 2 * DIM, generator=torch.Generator().manual_seed(0))
    key_cache, value_cache = layout.views(cache.to(layout.dtype))
    query = torch.randn(3 * HEADS, DIM, generator=torch.Generator().manual_seed(5))
    blocks = torch.tensor([4, 1, 2])
    scores = key_scores(query.to(layout.dtype), key_cache, blocks, layout)
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    keys = layout.gather(key_cache, value_cache, slots)[0].float()  # [T, Hkv, Dh]
    grouped = query.to(layout.dtype).float().view(HEADS, 3, DIM)
    expected = torch.einsum("hgd,thd->ht", grouped, keys)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)
