# SPDX-License-Identifier: Apache-2.0
"""Tree rows in layers with multi-head latent attention (MLA) on a CPU.

vLLM decodes single rows over the latent cache directly. It takes a request with drafts for a prompt
with a context, and would expand the context's keys and values in every layer and step. Here such
requests are decoded as well: all of their rows take vLLM's steps before and after the attention of
a decoding row, and attend the latent cache under the masks of their trees.

Seam: latent_backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonDecodeMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from vllm_specplug.kernels import LatentSpan, isolate_nonfinite, latent_attn
from vllm_specplug.vllm_attention.latent_gpu import latent_metadata
from vllm_specplug.vllm_attention.tree_rows import attach_tree_rows, tree_rows_of


class TreeCPUMLABackend(CPUMLABackend):
    """Registered over `CPU_MLA` in workers that draft trees for such a target."""

    takes_tree_rows = True

    @staticmethod
    def get_impl_cls() -> type[TreeCPUMLAImpl]:
        return TreeCPUMLAImpl


class TreeCPUMLAImpl(CPUMLAImpl):
    """vLLM's decoding for single rows, its prefill for prompts, and latent spans for requests with
    several rows over a context."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Absorbed queries [T', H, L + P], or their two parts, to [T', H, L]."""
        rows: Any = tree_rows_of(attn_metadata)
        if rows is None:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        output = query.new_empty((*query.shape[:2], self.kv_lora_rank))
        if rows.num_single:
            single = slice(0, rows.num_single)
            output[single], _ = super().forward_mqa(
                query[single], kv_c_and_k_pe_cache, attn_metadata, layer
            )
        latent_attn(query, kv_c_and_k_pe_cache, output, rows.spans, rows.block_table, self.scale)
        return output, None

    def do_kv_cache_update(
        self,
        # [T, L]
        kv_c_normed: torch.Tensor,
        # [T, 1, P]
        k_pe: torch.Tensor,
        # The cache, slots and scales; vLLM 0.33 passes one more than 0.32.
        *args: Any,
    ) -> None:
        # A latent row is both key and value, except its rotary key, which is only a key.
        k_pe, latents = isolate_nonfinite(k_pe, kv_c_normed.unsqueeze(1))
        super().do_kv_cache_update(latents.squeeze(1), k_pe, *args)


@dataclass(frozen=True)
class LatentRows:
    """The rows of a step for which vLLM would expand a context."""

    spans: Sequence[LatentSpan]
    # [B, blocks] int32
    block_table: torch.Tensor
    num_single: int
    """Number of leading rows of the batch that vLLM decodes."""


def line_mask(count: int) -> torch.Tensor:
    """Returns the mask bool [count, count] of rows that each attend the rows before them."""
    return torch.ones(count, count, dtype=torch.bool).tril()


def attach_latent_rows(attn_metadata: dict[str, Any], spans: Sequence[LatentSpan]) -> None:
    """Makes vLLM decode requests with several rows over the latent cache, in all MLA layers.

    Args:
        attn_metadata: vLLM's metadata by layer.
        spans: the first requests of the batch, up to the last one with computed tokens.
    """
    for metadata in latent_metadata(attn_metadata):
        first = metadata.num_decodes
        if len(spans) > first:
            rows = LatentRows(spans[first:], _block_table(metadata), metadata.num_decode_tokens)
            _decode(metadata, len(spans), spans[-1].first_row + spans[-1].num_rows)
            attach_tree_rows(metadata, rows)


def attach_warmup_rows(
    attn_metadata: dict[str, Any], num_rows: int, tree_rows: int, context: int, block_size: int
) -> None:
    """Turns the rows of a dummy forward into trees of `tree_rows` rows after `context` tokens."""
    for metadata in latent_metadata(attn_metadata):
        table = _block_table(metadata)
        spans = []
        for i, first in enumerate(range(0, num_rows, tree_rows)):
            count = min(tree_rows, num_rows - first)
            before = max(0, min(context, table.shape[1] * block_size - count))
            spans.append(LatentSpan(i % len(table), first, before, line_mask(count)))
        _decode(metadata, metadata.num_decodes + metadata.num_prefills, num_rows)
        attach_tree_rows(metadata, LatentRows(spans, table, num_single=0))


def _block_table(metadata: Any) -> torch.Tensor:
    """Returns [B, blocks] of all requests, which vLLM keeps in two parts."""
    parts = [part.block_table for part in (metadata.decode, metadata.prefill) if part is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(metadata: Any, num_requests: int, num_rows: int) -> None:
    """Tells vLLM that the first `num_requests` requests are decoded and the others are prompts
    without a context."""
    moved = num_requests - metadata.num_decodes
    if not moved:
        return
    metadata.num_decodes, metadata.num_decode_tokens = num_requests, num_rows
    metadata.num_prefills -= moved
    prefill = metadata.prefill
    if metadata.decode is None:
        # Its single rows: none.
        metadata.decode = MLACommonDecodeMetadata(
            block_table=prefill.block_table[:0],
            seq_lens=prefill.query_start_loc[:0],
            dcp_tot_seq_lens=None,
        )
    if not metadata.num_prefills:
        metadata.prefill = None
        return
    starts = prefill.query_start_loc[moved:]
    lengths = prefill.query_lens_cpu
    metadata.prefill = replace(
        prefill,
        block_table=prefill.block_table[moved:],
        query_start_loc=starts - starts[0],
        chunked_context=None,
        query_lens_cpu=None if lengths is None else lengths[moved:],
    )
    prefill.prefill_backend.prepare_metadata(metadata.prefill)
