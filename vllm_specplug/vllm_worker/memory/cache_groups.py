# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups: layers that share a block table.

A target whose layers keep different tokens has several groups. vLLM frees the blocks of a group
with a sliding window once they left the window. Their table entries then name vLLM's null block,
and the blocks may belong to another request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import extract_layer_index

from vllm_specplug.drafting.caches import TargetCacheSpec
from vllm_specplug.kernels import AttnFeatures, CpuKvLayout
from vllm_specplug.vllm_attention.cpu import cpu_kv_layout
from vllm_specplug.vllm_attention.tree_rows import (
    LayoutKey,
    TreeAttentionMixin,
    layout_key,
)
from vllm_specplug.vllm_worker.memory.draft_cache import DraftKVLayer

logger = init_logger("vllm.specplug")

# Layers without keys and values of the target: draft layers, and layers with a recurrent state.
_NO_TARGET_CACHE = (DraftKVLayer, MambaBase)


@dataclass(frozen=True)
class CacheGroup:
    """The target's layers of one KV cache group that have one kind of cache."""

    index: int
    """Index of the group's block table."""
    # by layer, each [num_blocks, Hkv, block_size, 2 * Dh], or [num_blocks, block_size, L + P] of
    # latent rows; layers may share a cache
    caches: dict[str, torch.Tensor]
    key_dtype: torch.dtype | None = None
    """Dtype of the keys and values that are written; None if the caches have the same dtype."""
    cache_dtype: str = "auto"
    """vLLM's name for the dtype of the caches."""
    # by layer; a missing layer has plain attention
    features: dict[str, AttnFeatures] = field(default_factory=dict)
    num_heads: int | None = None
    """Query heads of these layers on this rank; None for the model's."""
    latent_size: int = 0
    """Numbers of a latent row that are its value; 0 for caches of keys and values."""

    readers: frozenset[str] = frozenset()
    """The layers that read another layer's cache."""

    @property
    def own_caches(self) -> list[torch.Tensor]:
        """Each cache once, even if several layers read it: a path moved twice would be lost."""
        return [cache for name, cache in self.caches.items() if name not in self.readers]


def target_groups(kv_cache_config: Any, layers: Mapping[str, Any]) -> list[CacheGroup]:
    """Returns the groups with attention layers of the target, in vLLM's order.

    vLLM may put caches of different dtypes (`kv_cache_dtype_skip_layers`), head counts or sizes
    into one group. Here these are separate groups with the same index.

    Args:
        layers: vLLM's static forward context.
    """
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        members: dict[tuple[torch.dtype, torch.Size, int], list[str]] = {}
        for name in group.layer_names:
            if not isinstance(layers[name], _NO_TARGET_CACHE):
                cache = layers[name].kv_cache
                kind = (cache.dtype, cache.shape[1:], layers[name].num_heads)
                members.setdefault(kind, []).append(name)
        for names in members.values():
            first = layers[names[0]]
            caches = {name: layers[name].kv_cache for name in names}
            features = {
                name: impl.tree_features(layers[name])
                for name in names
                if isinstance(impl := getattr(layers[name], "impl", None), TreeAttentionMixin)
            }
            quantised = first.kv_cache.dtype in (torch.uint8, torch.int8)
            groups.append(
                CacheGroup(
                    index,
                    caches,
                    key_dtype=first.dtype if quantised else None,
                    cache_dtype=first.kv_cache_dtype if quantised else "auto",
                    features=features,
                    num_heads=first.num_heads,
                    latent_size=getattr(first, "kv_lora_rank", 0),
                    readers=frozenset(n for n in names if _reads_another(layers[n])),
                )
            )
    return groups


def _reads_another(layer: Any) -> bool:
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None


def target_layouts(groups: list[CacheGroup]) -> dict[LayoutKey, CpuKvLayout]:
    """Returns the measured layouts of the groups' caches on a CPU, by `layout_key`."""
    layouts = {}
    for group in groups:
        cache = next(iter(group.caches.values()))
        layouts[layout_key(cache)] = cpu_kv_layout(cache, group.key_dtype, group.cache_dtype)
    return layouts


def draft_group(kv_cache_config: Any, layers: Mapping[str, Any], method: str) -> int:
    """Returns the index of the group that holds the drafter's layers; 0 if it has none.

    Raises:
        ValueError: if vLLM put them into several groups.
    """
    found = [
        index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if any(isinstance(layers[name], DraftKVLayer) for name in group.layer_names)
    ]
    if len(found) > 1:
        raise ValueError(
            f"Speculative method {method!r} needs its draft layers in one KV cache group; beside "
            f"this target's layers vLLM spreads them over {len(found)}. Use "
            "--disable-hybrid-kv-cache-manager, or a head with fewer layers."
        )
    if found:
        _warn_of_small_groups(kv_cache_config.kv_cache_groups, layers, found[0], method)
    return found[0] if found else 0


def _warn_of_small_groups(groups: Any, layers: Mapping[str, Any], own: int, method: str) -> None:
    """Warns if draft layers make vLLM's groups small. All groups have the size of the smallest kind
    of layer, and each needs its own block tables and metadata in every step."""
    count, names = len(groups), groups[own].layer_names
    if count <= 2 or not all(isinstance(layers[name], DraftKVLayer) for name in names):
        return
    kinds: Counter[Any] = Counter()
    for index, group in enumerate(groups):
        if index != own:
            kinds[group.kv_cache_spec] += len(group.layer_names)
    fewest = min(kinds.values())
    without = sum(-(-layers_of_kind // fewest) for layers_of_kind in kinds.values())
    if without < count - 1:
        logger.warning(
            "Speculative method %r has %d draft layer(s) of another shape than the target's, for "
            "which vLLM splits the target's layers into %d KV cache groups instead of %d: steps "
            "take longer. --disable-hybrid-kv-cache-manager brings all layers into one group, "
            "which keeps also tokens that left a sliding window.",
            method, len(names), count - 1, without,
        )  # fmt: skip


def target_layer(
    groups: list[CacheGroup],
    layers: Mapping[str, Any],
    spec: TargetCacheSpec,
    method: str,
    num_ranks: int = 1,
) -> tuple[int, str]:
    """Returns group and name of the target's layer whose cache `spec` describes.

    Args:
        num_ranks: ranks among which the layer's KV heads are divided. If there are more than KV
            heads, each has a copy of one head, and only the divisibility can be checked.

    Raises:
        ValueError: if no layer has that window, the last one has other heads, or a later layer has
            another window although `spec` demands the last one.
    """
    windows = {
        name: group.features[name].window if name in group.features else 0
        for group in groups
        for name in group.caches
    }
    readers = {name for group in groups for name in group.readers}
    fitting = {name for name, window in windows.items() if window == (spec.window or 0)}
    name = max(fitting - readers, key=extract_layer_index, default=None)
    first = 0 if name is None else extract_layer_index(name)
    later = [n for n in windows if n not in fitting and extract_layer_index(n) >= first]
    if spec.must_be_last and later:
        last = max(later, key=extract_layer_index)
        raise ValueError(
            f"Speculative method {method!r} reads the whole context in the target's last layer, "
            f"and {last!r} keeps a sliding window of {windows[last]} tokens. Use another method, "
            "or a target whose last layer has full attention."
        )
    if name is None:
        kind = f"a sliding window of {spec.window} tokens" if spec.window else "full attention"
        kept = sorted({window for window in windows.values() if window})
        raise ValueError(
            f"Speculative method {method!r} reads keys and values of the target's last layer with "
            f"{kind}; this target has no such layer (its windows: {kept or 'none'}). Use another "
            "method."
        )
    layer = layers[name]
    kv_heads, wanted = layer.num_kv_heads, spec.num_kv_heads
    fits = kv_heads == max(1, wanted // num_ranks) and kv_heads * num_ranks % wanted == 0
    if not fits or layer.head_size != spec.head_dim:
        each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise ValueError(
            f"Speculative method {method!r} reads the cache of the target's layer {name!r}, which "
            f"has {kv_heads} KV heads of {layer.head_size}{each}; the head was made for "
            f"{wanted} of {spec.head_dim}. Use the head that was made for this target, or another "
            "method."
        )
    return next(group.index for group in groups if name in group.caches), name


def check_plain_attention(layers: Mapping[str, Any], method: str) -> None:
    """Refuses targets with more than plain full attention, which partial caches do not support.

    Raises:
        ValueError: naming the first layer that has more.
    """
    shapes = set()
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if not isinstance(impl, TreeAttentionMixin):
            continue
        shapes.add((layer.num_heads, layer.num_kv_heads, layer.head_size))
        if not impl.tree_features().is_plain:
            feature = (
                "has more than plain full attention (a sliding window, soft cap, sinks or ALiBi)"
            )
        elif layer.kv_sharing_target_layer_name is not None:
            feature = f"reads the KV cache of {layer.kv_sharing_target_layer_name!r}"
        elif len(shapes) > 1:
            feature = "has other head counts or sizes than those before it"
        else:
            continue
        raise ValueError(
            f"Speculative method {method!r} cannot draft with the target's own layers over partial "
            f"caches here: attention layer {name!r} {feature}. Use another method, or other "
            "settings of this one."
        )
