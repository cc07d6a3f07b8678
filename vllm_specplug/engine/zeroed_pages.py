# SPDX-License-Identifier: Apache-2.0
"""Zeroes new pages where KV cache groups with unlike heads share memory.

Seam: zeroed_pages. For our methods, a config whose groups have several head shapes asks vLLM to
zero new pages, as vLLM's own configs do for several precisions.

A draft whose values are not finite gets NaN keys (`kernels.finite_values`). Rows that do not
attend it are unaffected as long as the page is read with the layout that it was written in. A group
with other heads may read such keys as values, and attention multiplies the values after a request's
last token by 0, which gives NaN. Draft layers write only finite numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

from vllm_specplug.drafting.caches import DRAFT_LAYERS
from vllm_specplug.engine.spec_config import tree_config


class ZeroedKVCacheConfig(KVCacheConfig):
    """A config that asks vLLM to zero new pages; copies and pickles keep the class."""

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return True


def has_unlike_heads(config: Any) -> bool:
    """Whether groups of target layers that share memory differ in heads or block size."""
    shapes = {
        (spec.num_kv_heads, spec.head_size, spec.block_size)
        for group in config.kv_cache_groups
        if isinstance(spec := group.kv_cache_spec, AttentionSpec)
        and not all(name.startswith(DRAFT_LAYERS) for name in group.layer_names)
    }
    return len(shapes) > 1


def wrap_get_kv_cache_configs(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`get_kv_cache_configs`, which marks the configs that need zeroed pages."""

    def get_kv_cache_configs(vllm_config: Any, *args: Any, **kwargs: Any) -> list[Any]:
        configs = original(vllm_config, *args, **kwargs)
        if tree_config(vllm_config) is not None:
            for config in filter(has_unlike_heads, configs):
                config.__class__ = ZeroedKVCacheConfig
        return configs

    return get_kv_cache_configs
