# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a CPU: vLLM's own backend, in which the tree kernel attends tree rows."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    _get_attn_isa,
)

from vllm_specplug.kernels import (
    CpuKvLayout,
    TreeLayer,
    can_store_kv,
    probe_cpu_layout,
    store_kv,
)
from vllm_specplug.kernels.cpu_layout import FP8_CACHES
from vllm_specplug.vllm_attention.tree_rows import (
    CpuTreeRows,
    DraftAttention,
    TreeAttentionMixin,
    TreeRows,
    layout_key,
    tree_rows_of,
)


def cpu_kv_layout(
    kv_cache: torch.Tensor, key_dtype: torch.dtype | None = None, cache_dtype: str = "auto"
) -> CpuKvLayout:
    """Returns the probed layout of a layer's cache [blocks, Hkv, block, 2 * Dh].

    Args:
        key_dtype: of the written keys; None if the cache has the same dtype.
        cache_dtype: vLLM's name for the dtype of an 8-bit cache.
    """
    block_size, head_size = kv_cache.shape[2], kv_cache.shape[3] // 2
    if kv_cache.dtype != torch.uint8:
        isa = _get_attn_isa(kv_cache.dtype, block_size, head_size)
        return probe_cpu_layout(isa, kv_cache.dtype, block_size, head_size)
    assert key_dtype is not None
    isa = _get_attn_isa(key_dtype, block_size, head_size, cache_dtype)
    return probe_cpu_layout(isa, FP8_CACHES[cache_dtype], block_size, head_size, key_dtype)


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Registered over `CPU_ATTN` in workers that draft trees."""

    takes_tree_rows = True

    # A separate operator that stores costs a layer 20 to 30 us, as much as a short context.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionBackendImpl]:
        return TreeCPUAttentionBackendImpl


class DraftCPUAttentionBackend(TreeCPUAttentionBackend):
    """The backend of draft layers. It allows blocks of 16 tokens, which latent caches have and
    vLLM's kernel does not support; that kernel never reads draft pages."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


class TreeCPUAttentionBackendImpl(TreeAttentionMixin, CPUAttentionBackendImpl):
    """Stock attention for linear rows, the tree kernel for tree rows."""

    serves = frozenset({"sliding_window", "logits_soft_cap", "sinks", "alibi_slopes"})

    cache_dtypes = frozenset(FP8_CACHES)

    # The layout is found once per cache, because code in every layer of a step is expensive. The
    # reference is weak, because vLLM frees a layer's cache before the layer.
    _stored: tuple[weakref.ref[torch.Tensor], CpuKvLayout | None] | None = None

    def cache_scales(self, layer: Any) -> dict[str, Any]:
        return {"key_scale": layer._k_scale_float, "value_scale": layer._v_scale_float}

    def storable(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # vLLM's CPU operator only stores finite fp8 numbers.
        if self.kv_cache_dtype in self.cache_dtypes:
            return key, value
        return super().storable(key, value)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        # [T, Hkv, Dh]; None in a layer that reads the keys and values of another one
        key: Any,
        value: Any,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        # Warm-ups and draft forwards store nothing.
        stores = attn_metadata is not None and not isinstance(attn_metadata, DraftAttention)
        if stores and key is not None and self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self._stored is None or self._stored[0]() is not kv_cache:
            self._stored = weakref.ref(kv_cache), self._stored_layout(key, kv_cache)
        layout = self._stored[1]
        if layout is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            store_kv(key, value, kv_cache, slot_mapping, layout)

    def _stored_layout(self, key: torch.Tensor, kv_cache: torch.Tensor) -> CpuKvLayout | None:
        """Returns the layout of `kv_cache`; None if vLLM's operator has to write it."""
        is_own = self.attn_type == AttentionType.DECODER and key.dtype == kv_cache.dtype
        return cpu_kv_layout(kv_cache) if is_own and can_store_kv(kv_cache) else None

    def attend_rows(
        self,
        layer: Any,
        rows: TreeRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        block_table: torch.Tensor,
    ) -> None:
        if isinstance(rows, CpuTreeRows):
            known = self._tree_layer(layer, rows, query, kv_cache)
            if known is not None:
                known.attend(query, output, rows.metadata, block_table)
                return
        super().attend_rows(layer, rows, query, kv_cache, output, block_table)

    def own_rows(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any
    ) -> TreeRows | None:
        rows = tree_rows_of(attn_metadata)
        if isinstance(rows, CpuTreeRows) and not rows.has_trees:
            known = self._tree_layer(layer, rows, query, kv_cache)
            if known is None or not known.reads_in_place:
                return None
        return rows

    def _tree_layer(
        self, layer: Any, rows: CpuTreeRows, query: torch.Tensor, kv_cache: torch.Tensor
    ) -> TreeLayer | None:
        """Returns the layer's `TreeLayer`, made once for its cache; None if the compiled kernels do
        not serve it."""
        known = rows.layers.get(self)
        if known is None or known.kv_cache is not kv_cache:
            if not TreeLayer.serves(query, kv_cache):
                return None
            layout = rows.layouts[layout_key(kv_cache)]
            known = TreeLayer(kv_cache, layout, self.scale, self.tree_features(layer))
            rows.layers[self] = known
        return known
