# SPDX-License-Identifier: Apache-2.0
"""Sliding windows of draft blocks over pages: every row sees its window and nothing before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kernels.paged import layout_of, write_slots
from vllm_specplug.kernels import AttnFeatures, block_metadata, tree_attn
from vllm_specplug.kernels.reference import tree_attn_reference

SIZE, HEADS, KV_HEADS, DIM, ROWS, SCALE = 16, 4, 2, 16, 5, 0.4
CONTEXTS = [0, 3, 16, 37, 200, 79]


class Pages:
    """Random contexts in shuffled pages, and one block of rows for each."""

    def __init__(self, kind: str = "vec", dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.layout = layout_of(kind, dtype, SIZE, DIM)
        blocks = [-(-n // SIZE) for n in CONTEXTS]
        order = torch.randperm(sum(blocks), generator=generator)
        self.table = torch.zeros(len(CONTEXTS) + 1, max(blocks), dtype=torch.int32)
        self.cache = torch.zeros(sum(blocks), KV_HEADS, SIZE, 2 * DIM, dtype=dtype)
        self.context, used = [], 0
        for r, (n, count) in enumerate(zip(CONTEXTS, blocks, strict=True)):
            # Row r + 1 of the table: a request's row is not its place in the batch.
            self.table[r + 1, :count] = order[used : used + count].int()
            used += count
            key, value = torch.randn(2, n, KV_HEADS, DIM, generator=generator).to(dtype)
            slots = [int(self.table[r + 1, p // SIZE]) * SIZE + p % SIZE for p in range(n)]
            write_slots(self.layout, self.cache, slots, key, value)
            self.context.append((key, value))
        shape = (len(CONTEXTS) * ROWS, KV_HEADS, DIM)
        self.key, self.value = torch.randn(2, *shape, generator=generator).to(dtype)
        self.query = torch.randn(shape[0], HEADS, DIM, generator=generator).to(dtype)

    def expected(self, causal: bool, window: int | None) -> torch.Tensor:
        outputs = []
        for r, n in enumerate(CONTEXTS):
            rows = slice(r * ROWS, (r + 1) * ROWS)
            key, value = (
                torch.cat((old, new[rows])).double().repeat_interleave(HEADS // KV_HEADS, 1)
                for old, new in zip(self.context[r], (self.key, self.value), strict=True)
            )
            distance = torch.arange(n, n + ROWS)[:, None] - torch.arange(n + ROWS)
            seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
            if window is not None:
                seen = seen & (distance < window)
            scores = torch.einsum("ihd,jhd->hij", self.query[rows].double(), key) * SCALE
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hij,jhd->ihd", weights, value))
        return torch.cat(outputs)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("vec", torch.float32), ("table", torch.float32), ("vec", torch.bfloat16)],
)
@pytest.mark.parametrize("run", [tree_attn, tree_attn_reference])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 17, 204, 4096])
def test_rows_see_their_window(
    window: int,
    causal: bool,
    run: Callable[..., None],
    kind: str,
    dtype: torch.dtype,
    compiled: None,
) -> None:
    pages = Pages(kind, dtype)
    rows_of_table = range(1, len(CONTEXTS) + 1)
    metadata = block_metadata(rows_of_table, CONTEXTS, ROWS, causal, pages.table)
    output = torch.empty_like(pages.query)
    run(
        pages.query, *pages.layout.views(pages.cache), output, metadata, SCALE, pages.layout,
        pages.key, pages.value, features=AttnFeatures(window=window),
    )  # fmt: skip
    near = 2e-5 if dtype == torch.float32 else 2e-2
    expected = pages.expected(causal, window)
    torch.testing.assert_close(output.double(), expected, atol=near, rtol=near)
