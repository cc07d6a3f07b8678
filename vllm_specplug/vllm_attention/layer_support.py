# SPDX-License-Identifier: Apache-2.0
"""Checks which attention layers of a target can take tree rows.

Tree rows attend with a scale, a mask and the features that their implementation lists in `serves`.
They would skip any other feature, so a layer whose attributes show one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from vllm_specplug.vllm_attention.tree_rows import TREE_BACKEND_MARK, TreeAttentionMixin


def _is_none(value: Any) -> bool:
    return value is None


def _is_off(value: Any) -> bool:
    return not value


def _is_unlimited(value: Any) -> bool:
    return value in (None, -1, (-1, -1))


# Attribute of an implementation -> name of its feature, and a test whether a value switches it off.
# Backends lack some of the attributes.
IMPL_FEATURES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "alibi_slopes": ("ALiBi", _is_none),
    "use_alibi_sqrt": ("square-root ALiBi", _is_off),
    "sinks": ("attention sinks", _is_none),
    "logits_soft_cap": ("soft-capped logits", _is_off),
    "sliding_window": ("a sliding window", _is_unlimited),
    "chunk_lookback": ("chunked attention", _is_unlimited),
    "attn_type": ("attention that is not a decoder's", lambda v: v == AttentionType.DECODER),
}


# The same for attributes of layers with multi-head latent attention.
LATENT_FEATURES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "sliding_window": ("a sliding window", _is_none),
    "indexer": ("sparse attention, by an index of its own", _is_none),
    "use_sparse": ("sparse attention", _is_off),
    "non_causal_multi_token_decode": ("drafts that attend in both directions", _is_off),
}


def _unsupported_latent(layer: MLAAttention) -> str | None:
    for name, (title, changes_nothing) in LATENT_FEATURES.items():
        if not changes_nothing(getattr(layer, name)):
            return f"{title} ({name}={type(getattr(layer, name)).__name__})"
    backend = layer.attn_backend
    if not hasattr(backend, TREE_BACKEND_MARK):
        return (
            f"multi-head latent attention by {backend.__name__}; of such backends only CPU_MLA is "
            "served on a CPU (--attention-backend CPU_MLA selects it), and TRITON_MLA, FLASHMLA, "
            "FLASH_ATTN_MLA, FLASHINFER_MLA and CUTLASS_MLA on CUDA"
        )
    if TREE_BACKEND_MARK not in vars(backend) or not isinstance(layer.impl, backend.get_impl_cls()):
        return f"attention backend {backend.__name__} with {type(layer.impl).__name__}"
    return None


def unsupported_feature(layer: AttentionLayerBase) -> str | None:
    """Returns the feature of `layer` that tree rows would skip; None if they support the layer."""
    if type(layer) is MLAAttention:
        return _unsupported_latent(layer)
    if type(layer) is not Attention:
        return f"layer class {type(layer).__name__}"
    if not isinstance(layer.impl, TreeAttentionMixin):
        return f"implementation {type(layer.impl).__name__}"
    # A backend derived from the tree backend for one layer builds its own metadata.
    if TREE_BACKEND_MARK not in vars(layer.attn_backend):
        return f"attention backend {layer.attn_backend.__name__}"
    for name, (title, changes_nothing) in IMPL_FEATURES.items():
        if name in layer.impl.serves or not hasattr(layer.impl, name):
            continue
        if not changes_nothing(getattr(layer.impl, name)):
            value = getattr(layer.impl, name)
            shown = f"{len(value)} values" if isinstance(value, torch.Tensor | list) else value
            return f"{title} ({name}={shown})"
    if layer.use_mm_prefix:
        return "attention in both directions over a prefix"
    if layer.head_size_v != layer.head_size:
        return f"values of another size (head_size={layer.head_size}, {layer.head_size_v})"
    return None


def _latent_shape(layer: Any) -> tuple[int, ...]:
    """Returns the shape of a layer's latent cache; an empty one for layers with keys and values."""
    if not isinstance(layer, MLAAttention):
        return ()
    return layer.num_heads, layer.num_kv_heads, layer.head_size


def check_target_layers(
    layers: Mapping[str, Any], method: str, *, ignored: type | tuple[type, ...] = ()
) -> None:
    """Refuses a target with an attention layer that does not support tree rows.

    Args:
        layers: vLLM's static forward context: all kinds of layers by name.
        ignored: classes of layers that only drafters read.

    Raises:
        ValueError: naming the first such layer, its feature and what to do.
    """
    kinds: dict[tuple[int, ...], str] = {}
    for name, layer in layers.items():
        if not isinstance(layer, AttentionLayerBase) or isinstance(layer, ignored):
            continue
        feature = unsupported_feature(layer)
        if feature is None:
            kinds.setdefault(_latent_shape(layer), name)
            if len(kinds) > 1:
                first = next(iter(kinds.values()))
                feature = f"another latent cache than {first!r}"
        if feature is not None:
            raise ValueError(
                f"Speculative method {method!r} cannot verify trees in this target: attention "
                f"layer {name!r} has {feature}. Use a target without it (docs/targets.md "
                "says what is served where), or a chain method of vLLM's own."
            )


def check_cache_dtypes(
    caches: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    method: str,
    layers: Mapping[str, Any] | None = None,
) -> None:
    """Refuses caches [num_blocks, Hkv, block_size, 2 * Dh] of another dtype than the model's.

    Args:
        layers: the target's layers by name; without them no 8-bit cache is served.

    Raises:
        ValueError: naming the first such layer.
    """
    for name, cache in caches.items():
        if layers and cache.dtype in (torch.uint8, torch.int8):
            # Implementations of latent attention read no such cache.
            if layers[name].kv_cache_dtype in getattr(layers[name].impl, "cache_dtypes", ()):
                continue
        if cache.dtype != dtype:
            wanted = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"Speculative method {method!r} cannot verify trees over the KV cache of layer "
                f"{name!r}: its dtype is {str(cache.dtype).removeprefix('torch.')}, the model's "
                f"is {wanted}. A checkpoint with a quantised cache asks for that; override it "
                f"with --kv-cache-dtype {wanted}."
            )
