# SPDX-License-Identifier: Apache-2.0
"""A tree under a grammar: what is reachable, in which order, and where the cursor ends up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.candidates import paths_of, trees
from vllm_specplug.tree import ROOT
from vllm_specplug.tree.grammar import visit_tree


class PathCursor:
    """Allows the paths that a rule allows and knows where it stands."""

    def __init__(self, allows) -> None:
        self.allows = allows
        self.path: list[int] = []

    def advance(self, token_id: int) -> bool:
        if not self.allows([*self.path, token_id]):
            return False
        self.path.append(token_id)
        return True

    def retreat(self) -> None:
        self.path.pop()


def reachable_nodes(tokens: list[int], parents: list[int], cursor: PathCursor) -> list[int]:
    nodes: list[int] = []
    visit_tree(tokens, parents, cursor, nodes.append)
    return sorted(node for node in nodes if node != ROOT)


@given(trees(24, 31), st.integers(0, 30), st.integers(0, 60))
def test_reachable_nodes_are_those_whose_whole_path_is_allowed(tree, banned, most) -> None:
    def allows(path: list[int]) -> bool:
        return path[-1] != banned and sum(path) <= most

    cursor = PathCursor(allows)
    kept = reachable_nodes(tree.token_ids.tolist(), tree.parent_indices.tolist(), cursor)
    assert cursor.path == []

    def path_allowed(path: tuple[int, ...]) -> bool:
        return all(allows(list(path[: i + 1])) for i in range(len(path)))

    assert kept == [node for node, path in enumerate(paths_of(tree)) if path_allowed(path)]


@given(trees(24, 31))
def test_every_node_is_entered_once_on_its_own_path(tree) -> None:
    cursor = PathCursor(lambda path: True)
    seen: dict[int, tuple[int, ...]] = {}

    def enter(node: int) -> None:
        assert node not in seen
        seen[node] = tuple(cursor.path)

    visit_tree(tree.token_ids.tolist(), tree.parent_indices.tolist(), cursor, enter)
    assert seen == {ROOT: (), **dict(enumerate(paths_of(tree)))}
    assert cursor.path == []
