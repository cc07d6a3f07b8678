# SPDX-License-Identifier: Apache-2.0
"""The tree rows of one step, as the attention backends read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_specplug.kernels import CpuKvLayout, TreeAttnMetadata, tree_attn
from vllm_specplug.vllm_attention.draft_attention import DraftAttention

# Attribute of vLLM's attention metadata that carries `TreeRows`.
TREE_ROWS_ATTRIBUTE = "specplug_tree_rows"

# Class attribute of backends whose implementation takes tree rows over.
TREE_BACKEND_MARK = "takes_tree_rows"

# A layer's cache [num_blocks, Hkv, block_size, 2 * Dh] -> keys and values as the kernel takes them.
CacheViews = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class TreeRows(Protocol):
    """Which query rows are tree rows, and how they attend."""

    @property
    def covers_batch(self) -> bool:
        """Whether every row of the step is a tree row, so that the stock kernel can be skipped."""

    def attend(
        self,
        # [T, Hq, Dh]
        query: torch.Tensor,
        # [num_blocks, Hkv, block_size, 2 * Dh]
        kv_cache: torch.Tensor,
        # [T, Hq, Dh], written in place at tree rows
        output: torch.Tensor,
        scale: float,
    ) -> None:
        """Attention of the tree rows in one layer."""


@dataclass(frozen=True)
class CpuTreeRows:
    """Tree rows for the CPU kernels."""

    metadata: TreeAttnMetadata
    layout: CpuKvLayout
    """Layout of the target's cache."""
    covers_batch: bool

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, scale: float
    ) -> None:
        key_cache, value_cache = self.layout.views(kv_cache)
        tree_attn(query, key_cache, value_cache, output, self.metadata, scale, self.layout)


@dataclass(frozen=True)
class DeviceTreeRows:
    """Tree rows for a kernel of `kernels.cuda_contract`."""

    metadata: TreeAttnMetadata
    run: Callable[..., None]
    views: CacheViews
    covers_batch: bool

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, scale: float
    ) -> None:
        key_cache, value_cache = self.views(kv_cache)
        self.run(query, key_cache, value_cache, output, self.metadata, scale)


class TreeAttentionMixin:
    """Put before an attention implementation of vLLM: stock attention for linear rows, the tree
    kernel for tree rows."""

    scale: float

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(attn_metadata, DraftAttention):
            attn_metadata.attend(layer, query, key, value, output)
            return output
        rows = tree_rows_of(attn_metadata)
        if rows is None or not rows.covers_batch:
            super().forward(  # type: ignore[misc]
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if rows is not None:
            rows.attend(query, kv_cache, output, self.scale)
        return output


def attach_tree_rows(attn_metadata: Any, rows: TreeRows) -> None:
    """Puts `rows` on one layer's attention metadata."""
    setattr(attn_metadata, TREE_ROWS_ATTRIBUTE, rows)


def tree_rows_of(attn_metadata: Any) -> TreeRows | None:
    """The tree rows on `attn_metadata`; None for steps without trees and for warm-up."""
    return getattr(attn_metadata, TREE_ROWS_ATTRIBUTE, None)
