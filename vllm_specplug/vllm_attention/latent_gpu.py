# SPDX-License-Identifier: Apache-2.0
"""Tree rows in layers with multi-head latent attention (MLA) on CUDA.

vLLM's MLA backends share the layout of the cache and differ in their kernels for decoding. Here
requests with at most as many rows as the largest tree are decoded, whatever their numbers of rows.
vLLM's kernel serves a step in which each has one row, and a Triton kernel all other steps. Longer
pieces of prompts take vLLM's path for prompts.

Seam: latent_backend.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, QueryLenSupport
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specplug.vllm_attention.full_graphs import GraphSupport
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows, tree_rows_of

# vLLM's MLA backends whose caches hold latent rows in the model's dtype.
LATENT_BACKENDS = ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA")


def latent_metadata(attn_metadata: dict[str, Any]) -> list[Any]:
    """Returns the distinct metadata objects of MLA layers."""
    found = {id(m): m for m in attn_metadata.values() if isinstance(m, MLACommonMetadata)}
    return list(found.values())


class TreeMLAImplMixin:
    """A mixin for an MLA implementation of vLLM: its kernel for steps of single rows, the tree
    kernel for the others."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    scale: float

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Absorbed queries [T', H, L + P], or their two parts, to [T', H, L]."""
        rows = tree_rows_of(attn_metadata)
        if rows is None:
            return super().forward_mqa(  # type: ignore[misc]
                q, kv_c_and_k_pe_cache, attn_metadata, layer
            )
        from vllm_specplug.kernels.latent_attn_triton import latent_attn_triton

        assert isinstance(rows, DeviceTreeRows)
        if not isinstance(q, tuple):
            q = q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent, rotary = q
        output = latent.new_empty(latent.shape)
        metadata = rows.over(attn_metadata.decode.block_table)
        latent_attn_triton(latent, rotary, kv_c_and_k_pe_cache, output, metadata, self.scale)
        return output, None

    def reserve_workspace(self) -> None:
        """Reserves nothing: from 0.33 on vLLM's Triton kernel reserves memory for all rows that are
        decoded, and here it gets only single rows, for which its metadata builder reserves."""

    def do_kv_cache_update(
        self,
        # [T, L]
        kv_c_normed: torch.Tensor,
        # [T, 1, P]
        k_pe: torch.Tensor,
        # [num_blocks, block_size, L + P]
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        # vLLM 0.33 passes one more than 0.32.
        *scales: Any,
    ) -> None:
        if kv_cache.numel() == 0:
            return
        from vllm_specplug.kernels.finite_values_triton import store_isolated_triton

        # A latent row is both key and value, except its rotary key, which is only a key.
        rows = kv_cache.unsqueeze(2)
        store_isolated_triton(
            k_pe,
            kv_c_normed.unsqueeze(1),
            rows[..., self.kv_lora_rank :],
            rows[..., : self.kv_lora_rank],
            slot_mapping.flatten(),
        )


class RaggedDecodesMixin(GraphSupport):
    """A mixin for a metadata builder: requests with up to as many rows as the largest tree are
    decoded."""

    # While vLLM's builder is made: it may reserve memory for all rows that it decodes, and here its
    # kernel gets only single rows.
    query_len_support = QueryLenSupport.SINGLE_ONLY
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.query_len_support = QueryLenSupport.VARLEN
        self.reorder_batch_threshold = max_decode_query_len(vllm_config)


@cache
def tree_backend(stock: Any) -> Any:
    """Returns the subclass of an MLA backend of vLLM that computes tree rows."""

    def derived(name: str, *bases: type, **members: Any) -> type:
        return type(name, bases, {"__module__": __name__, **members})

    impl, builder = stock.get_impl_cls(), stock.get_builder_cls()
    tree_impl = derived(f"Tree{impl.__name__}", TreeMLAImplMixin, impl)
    tree_builder = derived(f"Tree{builder.__name__}", RaggedDecodesMixin, builder)
    return derived(
        f"Tree{stock.__name__}",
        stock,
        takes_tree_rows=True,
        get_impl_cls=staticmethod(lambda: tree_impl),
        get_builder_cls=staticmethod(lambda: tree_builder),
    )


def __getattr__(name: str) -> Any:
    """Returns `tree_backend` of the backend that vLLM lists as `name`.

    Made when asked for: each imports libraries that the others do not need.
    """
    if name not in LATENT_BACKENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tree_backend(resolve_obj_by_qualname(AttentionBackendEnum[name].value))
