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

# The runner's drafts carry {request id: parent indices} of constrained requests under the first
# name; the scheduler's output carries {request id: drafted nodes it scheduled} under the second.
PARENTS_ATTRIBUTE = "specplug_parents"
KEPT_NODES_ATTRIBUTE = "specplug_kept_nodes"
# On drafts: whether their tokens stay where they are, in the device's memory, so that no node may
# be dropped.
STAYS_ATTRIBUTE = "specplug_stays"


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


def reachable_nodes(
    token_ids: Sequence[int], parent_indices: Sequence[int], cursor: Cursor
) -> list[int]:
    """Indices of the nodes the cursor can reach, ascending: again a tree."""
    nodes: list[int] = []
    visit_tree(token_ids, parent_indices, cursor, nodes.append)
    return sorted(node for node in nodes if node != ROOT)


def renumbered_parents(parent_indices: Sequence[int], kept: Sequence[int]) -> list[int]:
    """[len(kept)] parents of the kept nodes, numbered among them.

    `kept` ascends and is closed under ancestors.
    """
    number = {ROOT: ROOT}
    parents = []
    for new, old in enumerate(kept):
        parents.append(number[int(parent_indices[old])])
        number[old] = new
    return parents
