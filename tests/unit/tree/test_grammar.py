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


@given(trees(24, 31), st.integers(0, 31), st.integers(0, 800))
def test_nodes_whose_whole_path_is_allowed_are_entered_once_on_it(tree, banned, most) -> None:
    def allows(path: list[int]) -> bool:
        return path[-1] != banned and sum(path) <= most

    def path_allowed(path: tuple[int, ...]) -> bool:
        return all(allows(list(path[: i + 1])) for i in range(len(path)))

    cursor = PathCursor(allows)
    seen: dict[int, tuple[int, ...]] = {}

    def enter(node: int) -> None:
        assert node not in seen
        seen[node] = tuple(cursor.path)

    visit_tree(tree.token_ids.tolist(), tree.parent_indices.tolist(), cursor, enter)
    allowed = {n: path for n, path in enumerate(paths_of(tree)) if path_allowed(path)}
    assert seen == {ROOT: (), **allowed}
    assert cursor.path == []
