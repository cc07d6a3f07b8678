# SPDX-License-Identifier: Apache-2.0
"""Tree attention on CUDA: vLLM's FlashAttention and Triton backends, in which tree kernels attend
tree rows.

Both keep the cache as [num_blocks, Hkv, block_size, 2 * Dh], K before V. A step with trees may
replay a full CUDA graph only if trees were captured in it. Otherwise these backends ask for
piecewise graphs, in which attention runs outside of the graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_specplug.kernels.cuda_contract import (
    E4M3_CACHES,
    TOKEN_SCALE_CACHES,
    numbers_and_scales,
)
from vllm_specplug.kernels.features import AttnFeatures
from vllm_specplug.vllm_attention.full_graphs import GraphSupport
from vllm_specplug.vllm_attention.tree_rows import TreeAttentionMixin

# Features that the Triton kernel reproduces. The other kernels hand such layers to it, or refuse.
SERVED = frozenset({"sliding_window", "logits_soft_cap", "sinks", "alibi_slopes"})


def gpu_cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a layer's cache [num_blocks, Hkv, block_size, 2 * Dh] as views of keys and values
    [num_blocks, block_size, Hkv, Dh].

    Bytes are e4m3. Scales per token follow the token's numbers in both views; see
    `numbers_and_scales`.
    """
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    key_cache, value_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return key_cache, value_cache


def without_scales(
    # as `gpu_cache_views` gives them
    views: tuple[torch.Tensor, torch.Tensor],
    cache_dtype: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the views of keys and values [num_blocks, block_size, Hkv, Dh] without scales, for
    vLLM's `cache_dtype`."""
    if cache_dtype not in TOKEN_SCALE_CACHES:
        return views
    (keys, _), (values, _) = map(numbers_and_scales, views)
    return keys, values


def warm_up_store(
    # [num_blocks, block_size, Hkv, Dh] each
    keys: torch.Tensor,
    values: torch.Tensor,
    dtype: torch.dtype,
    features: AttnFeatures,
) -> None:
    """Compiles the kernels that store keys and values of `dtype` in a layer; stores nothing."""
    from vllm_specplug.kernels.finite_values_triton import (
        isolate_nonfinite_triton,
        isolate_token_scales_triton,
        store_isolated_triton,
    )

    no_slot = torch.full((1,), -1, dtype=torch.int64, device=values.device)
    if not features.token_scales:
        stored = torch.zeros(2, 1, *values.shape[2:], dtype=dtype, device=values.device)
        if values.dtype == dtype:
            store_isolated_triton(*stored, keys, values, no_slot)
        else:
            isolate_nonfinite_triton(*stored)
        return
    assert features.key_scales is not None and features.value_scales is not None
    isolate_token_scales_triton(
        values, features.key_scales, features.value_scales, no_slot, floats=not features.int8_cache
    )


class _DeviceAttentionMixin(TreeAttentionMixin):
    attn_type: Any
    serves = SERVED
    cache_dtypes = E4M3_CACHES

    def cache_scales(self, layer: Any) -> dict[str, Any]:
        # As tensors: they are written in place while checkpoints load or vLLM calibrates.
        scales = {"key_scales": layer._k_scale, "value_scales": layer._v_scale}
        # vLLM then passes quantised queries.
        if layer.query_quant is not None:
            scales["query_scales"] = layer._q_scale
        return scales

    def storable(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm_specplug.kernels.finite_values_triton import isolate_nonfinite_triton

        # In place: nothing else reads them, and the host does not know whether any is non-finite.
        isolate_nonfinite_triton(key, value)
        return key, value

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        # Encoders have no cache, and cross-attention has its own slots.
        if kv_cache.dtype != key.dtype or self.attn_type != AttentionType.DECODER:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        from vllm_specplug.kernels.finite_values_triton import store_isolated_triton

        # One launch per layer instead of two.
        store_isolated_triton(key, value, *gpu_cache_views(kv_cache), slot_mapping)


class TreeFlashAttentionMetadataBuilder(GraphSupport, FlashAttentionMetadataBuilder):
    """vLLM's metadata; the runner attaches the tree rows."""


class TreeFlashAttentionImpl(_DeviceAttentionMixin, FlashAttentionImpl):
    """Stock attention for linear rows, the tree kernel for tree rows."""


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """Registered over `FLASH_ATTN` in workers that draft trees."""

    takes_tree_rows = True
    # From vLLM 0.33 on: some models would store keys and values without `do_kv_cache_update`.
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionMetadataBuilder]:
        return TreeFlashAttentionMetadataBuilder


class TreeTritonAttentionMetadataBuilder(GraphSupport, TritonAttentionMetadataBuilder):
    """vLLM's metadata; the runner attaches the tree rows."""


class TreeTritonAttentionImpl(_DeviceAttentionMixin, TritonAttentionImpl):
    """Stock attention for linear rows, the tree kernel for tree rows."""

    cache_dtypes = E4M3_CACHES.union(TOKEN_SCALE_CACHES)

    def cache_scales(self, layer: Any) -> dict[str, Any]:
        if self.kv_cache_dtype not in TOKEN_SCALE_CACHES:
            return super().cache_scales(layer)
        # vLLM's views of the scales, which it would otherwise create and fill at the first store.
        self._ensure_scale_caches(layer.kv_cache)
        return {
            "key_scales": self._k_scale_cache,
            "value_scales": self._v_scale_cache,
            "int8_cache": TOKEN_SCALE_CACHES[self.kv_cache_dtype] == torch.int8,
        }

    def storable(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kv_cache_dtype in TOKEN_SCALE_CACHES:
            # Numbers of such a cache cannot be NaN, only the scales that vLLM stores.
            return key, value
        return super().storable(key, value)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.kv_cache_dtype in TOKEN_SCALE_CACHES:
            from vllm_specplug.kernels.finite_values_triton import isolate_token_scales_triton

            _, values = gpu_cache_views(kv_cache)
            isolate_token_scales_triton(
                values[..., : value.shape[2]],
                self._k_scale_cache,
                self._v_scale_cache,
                slot_mapping[: len(key)],
                floats=TOKEN_SCALE_CACHES[self.kv_cache_dtype].is_floating_point,
            )

    def fused_output_quant_supported(self, quant_key) -> bool:
        return False


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """Registered over `TRITON_ATTN` in workers that draft trees."""

    takes_tree_rows = True

    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonAttentionMetadataBuilder]:
        return TreeTritonAttentionMetadataBuilder
