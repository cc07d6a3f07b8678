# SPDX-License-Identifier: Apache-2.0
"""The tree rows of one step, as the attention backends read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_specplug.kernels import (
    AttnFeatures,
    CpuKvLayout,
    TreeAttnMetadata,
    TreeLayer,
    isolate_nonfinite,
    tree_attn,
    tree_metadata,
)
from vllm_specplug.kernels.features import PLAIN

# Attribute of vLLM's attention metadata that carries `TreeRows`.
TREE_ROWS_ATTRIBUTE = "specplug_tree_rows"

# Class attribute of backends whose implementation takes tree rows over.
TREE_BACKEND_MARK = "takes_tree_rows"

# A layer's cache [num_blocks, Hkv, block_size, 2 * Dh] -> keys and values as the kernel takes them.
CacheViews = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


# Not abstract, because every layer of a step asks `isinstance`, which is slow for those classes.
class DraftAttention:
    """Replaces vLLM's attention metadata in a draft forward of the target itself."""

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """One layer: query [R, Hq, Dh], key and value [R, Hkv, Dh] -> output [R, Hq, Dh]."""
        raise NotImplementedError


# Block size, head size and dtype of a cache.
LayoutKey = tuple[int, int, torch.dtype]


def layout_key(kv_cache: torch.Tensor) -> LayoutKey:
    """Returns the key of the layout of a cache [num_blocks, Hkv, block_size, 2 * Dh]."""
    return kv_cache.shape[2], kv_cache.shape[3] // 2, kv_cache.dtype


@dataclass(frozen=True)
class RequestRows:
    """One request's rows in the target's forward of a step."""

    first_row: int
    """The first query row: of a prompt chunk, of recomputed tokens, or the root."""
    root_row: int
    """Row of the last token that is not a draft. The rows after it are the nodes of its tree."""
    end_row: int
    num_computed: int
    """Committed tokens in the cache before this step; position of `first_row`."""

    @property
    def is_tree(self) -> bool:
        return self.end_row > self.root_row + 1

    @property
    def context_len(self) -> int:
        """Tokens before the root, which is also the root's position."""
        return self.num_computed + self.root_row - self.first_row


@dataclass(frozen=True)
class CpuTreeRows:
    """Tree rows for the CPU kernels."""

    metadata: TreeAttnMetadata
    layouts: Mapping[LayoutKey, CpuKvLayout]
    """Layouts of the target's caches."""
    covers_batch: bool
    """Whether every row of the step is a tree row, so that the stock kernel can be skipped."""
    layers: dict[Any, TreeLayer] = field(default_factory=dict)
    """Layers of all steps, by attention implementation. The owner of the caches keeps them, because
    an implementation may outlive the caches."""
    has_trees: bool = True
    """If false, every request has one row or a chain of rows, which vLLM's kernel could attend."""

    def attend(
        self,
        # [T, Hq, Dh]
        query: torch.Tensor,
        # [num_blocks, Hkv, block_size, 2 * Dh]
        kv_cache: torch.Tensor,
        # [T, Hq, Dh], written in place at tree rows
        output: torch.Tensor,
        scale: float,
        features: AttnFeatures,
        # int32 [R, max_blocks] of the layer's KV cache group
        block_table: torch.Tensor,
    ) -> None:
        """Computes the attention of the tree rows in one layer."""
        layout = self.layouts[layout_key(kv_cache)]
        metadata = replace(self.metadata, block_table=block_table)
        tree_attn(
            query, *layout.views(kv_cache), output, metadata, scale, layout, features=features
        )


@dataclass(frozen=True)
class DeviceTreeRows:
    """Tree rows for a kernel of `kernels.cuda_contract`."""

    metadata: TreeAttnMetadata
    run: Callable[..., None]
    views: CacheViews
    covers_batch: bool
    _of_groups: dict[int, TreeAttnMetadata] = field(default_factory=dict)
    """Metadata over other block tables than the step's, by the table's address."""

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        scale: float,
        features: AttnFeatures = PLAIN,
        block_table: torch.Tensor | None = None,
    ) -> None:
        """See `CpuTreeRows.attend`."""
        key_cache, value_cache = self.views(kv_cache)
        # Not every kernel takes features.
        more = {} if features.is_plain else {"features": features}
        metadata = self.over(block_table)
        self.run(query, key_cache, value_cache, output, metadata, scale, **more)

    def over(self, block_table: torch.Tensor | None) -> TreeAttnMetadata:
        """Returns the metadata over the block table of a layer's group, made once per group and
        step.
        """
        if block_table is None or block_table.data_ptr() == self.metadata.block_table.data_ptr():
            return self.metadata
        address = block_table.data_ptr()
        if address not in self._of_groups:
            self._of_groups[address] = replace(self.metadata, block_table=block_table)
        return self._of_groups[address]


# The tree rows of a step and their attention.
TreeRows = CpuTreeRows | DeviceTreeRows


class TreeAttentionMixin:
    """A mixin for an attention implementation of vLLM: stock attention for linear rows, the tree
    kernel for tree rows."""

    scale: float
    kv_cache_dtype: str

    serves: ClassVar[frozenset[str]] = frozenset()
    """Attributes of the implementation whose effect the tree kernel reproduces."""

    cache_dtypes: ClassVar[frozenset[str]] = frozenset()
    """Values of `kv_cache_dtype` beside the model's dtype that the tree kernel reads."""

    def tree_features(self, layer: Any = None) -> AttnFeatures:
        """Returns the features that tree rows must reproduce, from the attributes in `serves`.

        Args:
            layer: vLLM's layer of this implementation, for the scales of a quantised cache.
        """
        values = {name: getattr(self, name, None) for name in self.serves}
        window, sinks = values.get("sliding_window"), values.get("sinks")
        if isinstance(window, tuple):
            # vLLM gives (keys before a row, keys after it).
            window = window[0] + 1
        # Layers have scales even if their cache is not quantised.
        quantised = layer is not None and self.kv_cache_dtype in self.cache_dtypes
        return AttnFeatures(
            window=0 if window is None or window < 0 else window,
            soft_cap=values.get("logits_soft_cap") or 0.0,
            sinks=None if sinks is None else sinks.detach(),
            alibi_slopes=values.get("alibi_slopes"),
            **(self.cache_scales(layer) if quantised else {}),
        )

    def cache_scales(self, layer: Any) -> dict[str, Any]:
        """Returns the scales of a quantised cache, as fields of `AttnFeatures`."""
        raise NotImplementedError

    def storable(
        self,
        # [T, Hkv, Dh]
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values that the cache may hold; see `kernels.finite_values`."""
        return isolate_nonfinite(key, value)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        key, value = self.storable(key, value)
        super().do_kv_cache_update(  # type: ignore[misc]
            layer, key, value, kv_cache, slot_mapping
        )

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
        rows = self.own_rows(layer, query, kv_cache, attn_metadata)
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
            self.attend_rows(layer, rows, query, kv_cache, output, attn_metadata.block_table)
        return output

    def own_rows(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any
    ) -> TreeRows | None:
        """Returns the rows that the tree kernel attends in this layer; None if there are none."""
        return tree_rows_of(attn_metadata)

    def attend_rows(
        self,
        layer: Any,
        rows: TreeRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        block_table: torch.Tensor,
    ) -> None:
        """Computes the attention of a step's tree rows in this layer; see `CpuTreeRows.attend`."""
        rows.attend(query, kv_cache, output, self.scale, self.tree_features(layer), block_table)


def attach_tree_rows(attn_metadata: Any, rows: Any) -> None:
    """Puts `TreeRows` on one layer's attention metadata, or `latent.LatentRows` for latent
    attention.
    """
    setattr(attn_metadata, TREE_ROWS_ATTRIBUTE, rows)


def put_rows(attn_metadata: Any, rows: TreeRows) -> None:
    """Attaches `rows` once to each distinct metadata object of a step."""
    for metadata in {id(m): m for m in attn_metadata.values()}.values():
        attach_tree_rows(metadata, rows)


def tree_rows_of(attn_metadata: Any) -> TreeRows | None:
    """Returns the tree rows on `attn_metadata`; None in steps without trees and in warm-ups."""
    return getattr(attn_metadata, TREE_ROWS_ATTRIBUTE, None)


def warmup_rows(
    num_rows: int, tree_rows: int, longest: int, block_table: torch.Tensor
) -> TreeAttnMetadata:
    """Returns the rows of a dummy forward as chains of `tree_rows` rows.

    Args:
        longest: tokens of the longest dummy, including its rows.
        block_table: int32 [R, blocks] of the dummies.
    """
    starts = range(0, num_rows, min(tree_rows, longest))
    counts = [min(starts.step, num_rows - start) for start in starts]
    return tree_metadata(
        req_indices=[i % len(block_table) for i in range(len(starts))],
        row_starts=starts,
        context_lens=[longest - count for count in counts],
        parents=[np.arange(-1, count - 2, dtype=np.int32) for count in counts],
        block_table=block_table,
    )
