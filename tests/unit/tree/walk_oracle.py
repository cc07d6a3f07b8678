# SPDX-License-Identifier: Apache-2.0
"""The walk down one tree as a loop on the host: what `step_trees.walk_trees` must do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_specplug.tree import DraftTree


def walk_on_host(
    tree: DraftTree,
    # the target's sample at the root, then at each node
    samples: Sequence[int],
    # tokens that end the request
    ends: Collection[int] = (),
) -> tuple[list[int], list[int]]:
    """Accepted nodes from the root down, and the emitted tokens, which are one more."""
    path: list[int] = []
    emitted: list[int] = []
    node = -1
    while True:
        token = int(samples[node + 1])
        emitted.append(token)
        child = tree.child_of(node, token)
        if child is None or token in ends:
            return path, emitted
        path.append(child)
        node = child
