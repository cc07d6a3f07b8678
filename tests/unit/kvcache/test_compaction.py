# SPDX-License-Identifier: Apache-2.0
"""Moves make the accepted path contiguous without losing a source."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.kvcache import path_moves


@given(
    st.lists(st.integers(0, 40), unique=True, max_size=12).map(sorted),
    st.integers(0, 70),
    st.sampled_from([4, 16, 32]),
    st.integers(0, 2**31),
)
def test_moving_in_order_equals_a_gather(
    path: list[int], context_len: int, block_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num_blocks = (context_len + 64) // block_size + 1
    block_ids = rng.permutation(num_blocks * 2)[:num_blocks].astype(np.int32)
    cache = np.arange(num_blocks * 2 * block_size)

    def slot(position: int) -> int:
        return int(block_ids[position // block_size]) * block_size + position % block_size

    expected = [cache[slot(context_len + 1 + node)] for node in path]
    sources, targets = path_moves([(path, context_len, block_ids)], block_size)
    for source, target in zip(sources, targets, strict=True):
        cache[target] = cache[source]
    assert [cache[slot(context_len + 1 + k)] for k in range(len(path))] == expected


def test_contiguous_paths_move_nothing() -> None:
    sources, targets = path_moves([([0, 1, 2], 5, np.array([0, 1]))], 8)
    assert sources.size == targets.size == 0
