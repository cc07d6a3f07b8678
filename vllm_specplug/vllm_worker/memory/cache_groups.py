# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups: layers that share a block table.

A target whose layers do not all keep the same tokens has several groups. Blocks of a group with a
sliding window are freed once they left it; their table entries then name vLLM's null block, and
the blocks themselves may be another request's.
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

from vllm_specplug.kernels import AttnFeatures, CpuKvLayout
from vllm_specplug.vllm_attention.cpu import cpu_kv_layout
from vllm_specplug.vllm_attention.tree_rows import (
    LayoutKey,
    TreeAttentionMixin,
    layout_key,
)
from vllm_specplug.vllm_worker.memory.draft_cache import DraftKVLayer

logger = init_logger("vllm.specplug")

# Draft layers' caches are the drafter's; a state is no keys and values (`state_layers`).
_NO_TARGET_CACHE = (DraftKVLayer, MambaBase)


@dataclass(frozen=True)
class CacheGroup:
    """The target's layers of one KV cache group, or those of one kind of cache where it has
    several."""

    index: int
    """Of its block table among those of the engine."""
    # by layer, each [num_blocks, Hkv, block_size, 2 * Dh]; a layer may read another's
    caches: dict[str, torch.Tensor]
    key_dtype: torch.dtype | None = None
    """Of the keys and values that are written; None where the caches hold them as they are."""
    cache_dtype: str = "auto"
    """vLLM's name for the numbers of the caches."""
    # by layer; those that are not there are plain
    features: dict[str, AttnFeatures] = field(default_factory=dict)
    num_heads: int | None = None
    """Of queries in these layers, on this rank; None for the model's."""

    readers: frozenset[str] = frozenset()
    """Of these layers, those that read another's cache."""

    @property
    def own_caches(self) -> list[torch.Tensor]:
        """Each cache once, however many layers read it: a path moved twice would be lost."""
        return [cache for name, cache in self.caches.items() if name not in self.readers]


def target_groups(kv_cache_config: Any, layers: Mapping[str, Any]) -> list[CacheGroup]:
    """The groups with attention layers of the target, in vLLM's order.

    vLLM may put caches of different numbers (`kv_cache_dtype_skip_layers`) or head counts and sizes
    into one group; here they are two, of one index.

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
                    readers=frozenset(n for n in names if _reads_another(layers[n])),
                )
            )
    return groups


def _reads_another(layer: Any) -> bool:
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None


def target_layouts(groups: list[CacheGroup]) -> dict[LayoutKey, CpuKvLayout]:
    """The measured layouts of the groups' caches on a CPU, by `layout_key`."""
    layouts = {}
    for group in groups:
        cache = next(iter(group.caches.values()))
        layouts[layout_key(cache)] = cpu_kv_layout(cache, group.key_dtype, group.cache_dtype)
    return layouts


def draft_group(kv_cache_config: Any, layers: Mapping[str, Any], method: str) -> int:
    """Index of the group that holds the drafter's layers; 0 where it has none.

    Raises:
        ValueError: when vLLM spread them over several.
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
    """vLLM's groups are as small as the fewest layers of one kind, which may be the drafter's; each
    group has block tables and metadata of its own in every step."""
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


def last_layer(groups: list[CacheGroup], layers: Mapping[str, Any], method: str) -> tuple[int, str]:
    """Group and name of the target's last attention layer, for drafters that read its cache.

    Raises:
        ValueError: when that layer does not keep the whole context.
    """
    name = max((n for group in groups for n in group.caches), key=extract_layer_index)
    impl = layers[name].impl
    window = impl.tree_features().window if isinstance(impl, TreeAttentionMixin) else 0
    if window:
        raise ValueError(
            f"Speculative method {method!r} reads the whole context in the target's last layer, "
            f"and {name!r} keeps a sliding window of {window} tokens. Use another method, or a "
            "target whose last layer has full attention."
        )
    return next(group.index for group in groups if name in group.caches), name


def check_plain_attention(layers: Mapping[str, Any], method: str, what: str, remedy: str) -> None:
    """Refuses targets with more than plain full attention, as `what` serves nothing else.

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
            f"Speculative method {method!r} cannot use {what} here: attention layer {name!r} "
            f"{feature}. {remedy}."
        )
