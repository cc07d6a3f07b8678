# SPDX-License-Identifier: Apache-2.0
"""Walking a tree under a grammar whose matcher has one state and can roll back.

A grammar matcher reads one line of tokens. A tree is many lines that share beginnings: going
down an edge feeds the matcher one token, coming back up takes it away again. Each node is fed
once, so a tree of N nodes costs N advances, as a chain of N does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_specplug.tree.draft_tree import ROOT

# The runner's drafts carry {request id: parent indices} of constrained requests under this name.
PARENTS_ATTRIBUTE = "specplug_parents"


class Cursor(Protocol):
    """A position in a text under constraints, movable along tree edges."""

    def advance(self, token_id: int) -> bool:
        """Appends a token if the text may go on with it; otherwise changes nothing."""

    def retreat(self) -> None:
        """Takes the last appended token away."""


def visit_tree(
    token_ids: Sequence[int],
    parent_indices: Sequence[int],
    cursor: Cursor,
    enter: Callable[[int], None],
) -> None:
    """Visits the root and every node the cursor can reach, parents before their children.

    Args:
        token_ids: [N].
        parent_indices: [N], ROOT (-1) for the children of the root; parent before child. Nodes of
            any other negative parent are not visited.
        cursor: stands at the root, and stands there again afterwards.
        enter: called with ROOT and with each reachable node while the cursor stands there. A
            node below an unreachable one is unreachable.
    """
    children: list[list[int]] = [[] for _ in range(len(token_ids) + 1)]
    for child, parent in enumerate(parent_indices):
        if parent >= ROOT:
            children[parent + 1].append(child)
    enter(ROOT)
    # Pairs of a node to try and nodes to leave; an explicit stack, because chains may be long.
    pending: list[int | None] = list(reversed(children[0]))
    while pending:
        node = pending.pop()
        if node is None:
            cursor.retreat()
        elif cursor.advance(token_ids[node]):
            enter(node)
            pending.append(None)
            pending.extend(reversed(children[node + 1]))
