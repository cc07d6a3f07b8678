# SPDX-License-Identifier: Apache-2.0
"""Trees over a cache of latent rows as on CUDA, for kernels in an interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from tests.kernels.paged import chain_attention, path_of, random_parents
from vllm_specplug.kernels import TreeAttnMetadata, tree_metadata
from vllm_specplug.kernels.latent_attn_triton import latent_attn_triton

LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}


class LatentTrees:
    """Trees of (context, nodes); slots that nobody owns are NaN."""

    def __init__(
        self,
        specs: list[tuple[int, int]],
        *,
        dtype: torch.dtype = torch.float32,
        heads: int = 3,
        latent: int = 32,
        rotary: int = 16,
        page: int = 16,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        draw = torch.Generator().manual_seed(seed)
        size = latent + rotary
        self.dtype, self.latent, self.scale = dtype, latent, size**-0.5
        self.contexts = [c for c, _ in specs]
        self.parents = [random_parents(n, rng) for _, n in specs]
        self.rows = [n + 1 for _, n in specs]
        blocks = max(-(-(c + n) // page) for c, n in zip(self.contexts, self.rows, strict=True))
        used = torch.randperm(len(specs) * blocks + 1, generator=draw)[: len(specs) * blocks]
        # Request numbers are not tree numbers: the table has a row of rubbish first.
        rubbish = torch.full((1, blocks), 10**9)
        self.block_table = torch.cat([rubbish, used.view(-1, blocks)]).int()
        self.cache = torch.full((len(specs) * blocks + 1, page, size), torch.nan, dtype=dtype)
        self.starts = (2 + np.cumsum([0, *(n + 2 for n in self.rows[:-1])])).tolist()
        self.stored = []
        for r, (context, n) in enumerate(zip(self.contexts, self.rows, strict=True)):
            tokens = torch.randn(context + n, size, generator=draw).to(dtype)
            self.stored.append(tokens)
            for position, row in enumerate(tokens):
                self.slot(r, position).copy_(row)
        count = self.starts[-1] + self.rows[-1] + 2
        # The rotary part is a slice of a joined projection: rows are not contiguous.
        self.q_latent = torch.randn(count, heads, latent, generator=draw).to(dtype)
        joined = torch.randn(count, heads, 16 + rotary, generator=draw).to(dtype)
        self.q_rotary = joined[..., 16:]

    def slot(self, tree: int, position: int) -> torch.Tensor:
        """The cache row of a token."""
        page = self.cache.shape[1]
        return self.cache[int(self.block_table[tree + 1, position // page]), position % page]

    def metadata(self, skipped: int = 0) -> TreeAttnMetadata:
        """`skipped` more trees of no rows, as a graph for a larger batch has them."""
        made = tree_metadata(
            [r + 1 for r in range(len(self.rows))], self.starts, self.contexts, self.parents,
            self.block_table,
        )  # fmt: skip
        nothing = torch.tensor([[10**6, 10**6, 0, 10**6, 10**6]] * skipped, dtype=torch.int32)
        plan = torch.cat([made.plan, nothing.view(-1, 5).t()], dim=1).contiguous()
        return replace(made, plan=plan)

    def expected(self) -> Iterator[torch.Tensor]:
        """Rows [n, H, L] of each tree in float64, each as if its branch had been decoded alone."""
        query = torch.cat([self.q_latent, self.q_rotary], dim=2)
        for r, context in enumerate(self.contexts):
            rows = []
            for row in range(self.rows[r]):
                path = [context + j for j in path_of(self.parents[r], row)]
                keys = self.stored[r][[*range(context), *path]][:, None]
                values = keys[..., : self.latent]
                rows.append(chain_attention(query[self.starts[r] + row], keys, values, self.scale))
            yield torch.stack(rows)

    def answer(
        self, meta: TreeAttnMetadata | None = None, splits: int | None = None
    ) -> torch.Tensor:
        output = torch.full(self.q_latent.shape, 7.0, dtype=self.dtype)
        latent_attn_triton(
            self.q_latent, self.q_rotary, self.cache, output, meta or self.metadata(), self.scale,
            splits=splits,
        )  # fmt: skip
        return output

    def check(
        self, *, splits: int | None = None, skipped: int = 0,
        damage: Callable[[TreeAttnMetadata], None] = lambda meta: None,
    ) -> None:  # fmt: skip
        """The kernel against the oracle; `damage` changes what the kernel is told."""
        meta = self.metadata(skipped)
        damage(meta)
        output = self.answer(meta, splits)
        for start, n, expected in zip(self.starts, self.rows, self.expected(), strict=True):
            actual = output[start : start + n].double()
            assert not actual.isnan().any(), "an unused slot was read"
            error = (actual - expected).abs().max().item()
            assert error <= LIMITS[self.dtype], f"off by {error}"
            output[start : start + n] = 7.0
        assert bool((output == 7.0).all()), "a row of no tree was written"
