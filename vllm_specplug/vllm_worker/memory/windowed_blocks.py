# SPDX-License-Identifier: Apache-2.0
"""Attention of draft blocks in layers with a sliding window, over vLLM's pages.

A block row at position p attends positions p - window + 1 to p of its context. The compiled kernel
reads the pages that every row attends completely, through a block table that starts at the first of
them. The few tokens before them and the block's own rows are attended densely. Log-sum-exps join
both parts.
"""

from __future__ import annotations

import torch

from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import CpuKvLayout, block_metadata, prefix_attn
from vllm_specplug.kernels.reference import dense_attention


class WindowedBlocks:
    """One draft forward of a batch; see `PagedDraftCache.block_attention`."""

    def __init__(
        self,
        requests: DraftRequests,
        rows: int,
        causal: bool,
        window: int,
        # [B, max_blocks]
        block_table: torch.Tensor,
        layout: CpuKvLayout,
        scale: float,
    ) -> None:
        self.rows, self.layout, self.scale = rows, layout, scale
        size = layout.block_size
        tables, contexts = [], []
        # Per request: slots int64 [E] of the context tokens that some rows do not attend, and the
        # mask bool [rows, E + rows] over these tokens and the block.
        self.edges: list[tuple[torch.Tensor, torch.Tensor]] = []
        own = torch.ones(rows, rows, dtype=torch.bool)
        own = own.tril() if causal else own
        for index, context in zip(requests.req_indices, requests.context_lens, strict=True):
            table = block_table[index].long()
            first = max(0, context - window + 1)
            first_page = min(-(-max(0, context + rows - window) // size), -(-context // size))
            start = min(first_page * size, context)
            positions = torch.arange(min(first, start), start)
            distance = torch.arange(context, context + rows)[:, None] - positions
            # A window shorter than the block also limits the block's own rows.
            apart = torch.arange(rows)[:, None] - torch.arange(rows)
            seen = torch.cat((distance < window, own & (apart < window)), dim=1)
            self.edges.append((table[positions // size] * size + positions % size, seen))
            tables.append(table.roll(-first_page))
            contexts.append(context - start)
        self.metadata = block_metadata(
            range(len(tables)), contexts, rows, causal, torch.stack(tables).int()
        )

    def __call__(
        self,
        # [R * rows, Hq, Dh]
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        # [R * rows, Hkv, Dh]
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """[R * rows, Hq, Dh]."""
        context = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
        prefix_attn(
            query, key_cache, value_cache, context, lse, self.metadata, self.scale, self.layout
        )
        output = torch.empty_like(query)
        group = query.shape[1] // key.shape[1]
        for r, (slots, seen) in enumerate(self.edges):
            at = slice(r * self.rows, (r + 1) * self.rows)
            edge_key, edge_value = self.layout.gather(key_cache, value_cache, slots)
            near, near_lse = dense_attention(
                query[at],
                torch.cat((edge_key, key[at])),
                torch.cat((edge_value, value[at])),
                self.scale,
                group,
                seen,
            )
            # The context's share. The dense part is finite, because a row attends itself.
            share = (lse[at] - near_lse).sigmoid().unsqueeze(-1)
            output[at] = (share * context[at].float() + (1 - share) * near).to(output.dtype)
        return output
