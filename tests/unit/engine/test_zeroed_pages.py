# SPDX-License-Identifier: Apache-2.0
"""Which targets have their pages zeroed."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from vllm_specplug.drafting.caches import DRAFT_LAYERS
from vllm_specplug.engine import zeroed_pages


def full(heads: int, size: int) -> Any:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=size, dtype=torch.float32)


def window(heads: int, size: int) -> Any:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=heads, head_size=size, dtype=torch.float32, sliding_window=8
    )


@pytest.mark.parametrize(
    ("groups", "is_tree", "zeroed"),
    [
        ({"a": full(2, 32), "b": window(1, 64)}, True, True),
        ({"a": full(2, 32), "b": window(1, 64)}, False, False),
        ({"a": full(2, 32), "b": window(2, 32)}, True, False),
        ({"a": full(2, 32)}, True, False),
        # What drafts leave behind is finite.
        ({"a": window(2, 32), f"{DRAFT_LAYERS}.0.attn": full(1, 64)}, True, False),
    ],
)
def test_pages_that_unlike_heads_share_are_zeroed(
    monkeypatch: pytest.MonkeyPatch, groups: dict[str, Any], is_tree: bool, zeroed: bool
) -> None:
    monkeypatch.setattr(zeroed_pages, "tree_config", lambda config: config.speculative_config)
    made = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in groups.items()],
    )
    configs = zeroed_pages.wrap_get_kv_cache_configs(lambda *args: [made])
    config: Any = SimpleNamespace(speculative_config=object() if is_tree else None)
    (found,) = configs(config, [], [])
    # As vLLM hands it to the scheduler and to workers.
    for each in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert each.needs_kv_cache_zeroing == zeroed
