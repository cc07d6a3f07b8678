# SPDX-License-Identifier: Apache-2.0
"""Where the accepted path lies in the paged cache, and where it must lie.

During verification node i of a tree occupies position context + 1 + i of its request's
blocks. Once a path is accepted, its k-th node must stand at position context + 1 + k, where
plain decoding would have put it. Since parents precede children, destination <= source for
every move and moving in ascending order never overwrites a source that is still needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def path_moves(
    paths: Iterable[tuple[Sequence[int], int, np.ndarray]], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Slots to move so that every accepted path is contiguous.

    Args:
        paths: (accepted node indices, context length, block ids [max_blocks]) per request.
        block_size: tokens per block.

    Returns:
        Source and destination slots, int64 [P] each, in the order they must be moved.
    """
    sources: list[int] = []
    targets: list[int] = []
    for nodes, context_len, block_ids in paths:
        first = context_len + 1
        for k, node in enumerate(nodes):
            if node != k:
                source, target = first + node, first + k
                sources.append(
                    int(block_ids[source // block_size]) * block_size + source % block_size
                )
                targets.append(
                    int(block_ids[target // block_size]) * block_size + target % block_size
                )
    return np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
