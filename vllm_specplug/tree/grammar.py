# SPDX-License-Identifier: Apache-2.0
"""Walks a tree with a grammar matcher that has one state and can roll back.

A matcher reads one sequence of tokens. Going down an edge of the tree feeds it one token, and going
back up rolls it back by one. Each node is fed once, so a tree of N nodes costs N advances, as a
chain of N nodes does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_specplug.tree.draft_tree import ROOT

# Attribute of the runner's drafts: {request id: parent indices} of constrained requests.
PARENTS_ATTRIBUTE = "specplug_parents"


class Cursor(Protocol):
    """A position in a constrained text, which moves along tree edges."""

    def advance(self, token_id: int) -> bool:
        """Appends a token if it is allowed, and returns whether it is."""

    def retreat(self) -> None:
        """Removes the last token."""


def visit_tree(
    token_ids: Sequence[int],
    parent_indices: Sequence[int],
    cursor: Cursor,
    enter: Callable[[int], None],
) -> None:
    """Visits the root and every node that the cursor can reach, parents before their children.

    Args:
        token_ids: [N].
        parent_indices: [N], ROOT (-1) for the children of the root; parent before child. Nodes with
            any other negative parent are not visited.
        cursor: at the root, before the call and after it.
        enter: called with ROOT and each reachable node while the cursor is there. Descendants of an
            unreachable node are unreachable.
    """
    children: list[list[int]] = [[] for _ in range(len(token_ids) + 1)]
    for child, parent in enumerate(parent_indices):
        if parent >= ROOT:
            children[parent + 1].append(child)
    enter(ROOT)
    # Nodes to enter, and None to leave one. An explicit stack, because chains may be long.
    pending: list[int | None] = list(reversed(children[0]))
    while pending:
        node = pending.pop()
        if node is None:
            cursor.retreat()
        elif cursor.advance(token_ids[node]):
            enter(node)
            pending.append(None)
            pending.extend(reversed(children[node + 1]))
