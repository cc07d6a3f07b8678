# SPDX-License-Identifier: Apache-2.0
"""The flat draft tree that every drafter returns and verification reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

ROOT = -1
"""Parent index of the nodes directly below the root."""

# Attribute of the runner's drafts: {request id: parent indices} of constrained requests.
PARENTS_ATTRIBUTE = "specplug_parents"

_ARRAYS = (
    ("token_ids", np.int64),
    ("parent_indices", np.int32),
    ("depths", np.int32),
    ("scores", np.float32),
)


@dataclass(frozen=True, eq=False, slots=True)
class DraftTree:
    """A tree of draft tokens below the last committed token.

    The root is that committed token. It is not a node, so N counts only draft tokens. A parent
    always comes before its children, so every prefix of the arrays is also a tree, and a scheduler
    that keeps only the first n drafts need not know about trees. Siblings never repeat a token. A
    chain is a tree with one branch; a tree of zero nodes means no draft.
    """

    # [N]
    token_ids: npt.NDArray[np.int64]
    # [N] index of the parent node, ROOT (-1) for the children of the root
    parent_indices: npt.NDArray[np.int32]
    # [N] distance to the root, 1 for its children
    depths: npt.NDArray[np.int32]
    # [N] cumulative draft log-probability of the path from the root, at most the parent's; zeros if
    # a drafter has none
    scores: npt.NDArray[np.float32]

    @classmethod
    @cache
    def empty(cls) -> DraftTree:
        """Returns the tree without nodes, always the same object, for plain decoding."""
        return cls(
            token_ids=np.empty(0, np.int64),
            parent_indices=np.empty(0, np.int32),
            depths=np.empty(0, np.int32),
            scores=np.empty(0, np.float32),
        )

    @classmethod
    def chain(
        cls,
        token_ids: Sequence[int] | npt.NDArray[np.int64],
        scores: Sequence[float] | npt.NDArray[np.float32] | None = None,
    ) -> DraftTree:
        """Returns a tree with one branch: `token_ids` [N], `scores` [N] or zeros."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        num_nodes = len(tokens)
        return cls(
            token_ids=tokens,
            parent_indices=np.arange(-1, num_nodes - 1, dtype=np.int32),
            depths=np.arange(1, num_nodes + 1, dtype=np.int32),
            scores=(
                np.zeros(num_nodes, np.float32)
                if scores is None
                else np.asarray(scores, dtype=np.float32)
            ),
        )

    @classmethod
    def split(
        cls,
        # [R, N] each
        token_ids: npt.NDArray[np.int64],
        parent_indices: npt.NDArray[np.int32],
        depths: npt.NDArray[np.int32],
        scores: npt.NDArray[np.float32],
        # [R]
        counts: npt.NDArray[np.integer],
    ) -> list[DraftTree]:
        """Returns R trees as views of padded arrays; request r has `counts[r]` of N nodes."""
        return [
            cls(token_ids[r, :n], parent_indices[r, :n], depths[r, :n], scores[r, :n])
            for r, n in enumerate(counts.tolist())
        ]

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node, 0 for the empty tree."""
        return int(self.depths.max()) if len(self.depths) else 0

    def prefix(self, num_nodes: int) -> DraftTree:
        """Returns the tree of the first `num_nodes` nodes as views; itself if it is smaller."""
        assert num_nodes >= 0, num_nodes
        if num_nodes >= self.num_nodes:
            return self
        return DraftTree(
            token_ids=self.token_ids[:num_nodes],
            parent_indices=self.parent_indices[:num_nodes],
            depths=self.depths[:num_nodes],
            scores=self.scores[:num_nodes],
        )

    def subset(self, nodes: Sequence[int] | npt.NDArray[np.integer]) -> DraftTree:
        """Returns the tree of `nodes`, ascending indices that include all ancestors."""
        index = np.asarray(nodes, dtype=np.int64)
        numbers = np.full(self.num_nodes + 1, -2, dtype=np.int32)
        numbers[-1] = ROOT  # parent index -1 reads the last entry
        numbers[index] = np.arange(len(index), dtype=np.int32)
        parents = numbers[self.parent_indices[index]]
        assert (parents >= ROOT).all(), "a node without its parent"
        return DraftTree(
            token_ids=self.token_ids[index],
            parent_indices=parents,
            depths=self.depths[index],
            scores=self.scores[index],
        )

    def child_of(self, parent_index: int, token_id: int) -> int | None:
        """Returns the child of `parent_index` (or ROOT) with `token_id`; None if there is none."""
        is_child = (self.parent_indices == parent_index) & (self.token_ids == token_id)
        return int(is_child.argmax()) if is_child.any() else None

    def fault(self, vocab_size: int = 1 << 62) -> str | None:
        """Returns the violated invariant of the class and the first node that violates it; None for
        a valid tree with tokens below `vocab_size`.

        Cheap enough for every step (0.2 us per node).
        """
        num_nodes = len(self.token_ids)
        for name, dtype in _ARRAYS:
            array = getattr(self, name)
            if array.shape != (num_nodes,) or array.dtype != dtype:
                return (
                    f"{name} has shape {array.shape} and dtype {array.dtype}; expected "
                    f"({num_nodes},) and {np.dtype(dtype)}"
                )
        tokens, parents = self.token_ids.tolist(), self.parent_indices.tolist()
        depths, scores = self.depths.tolist(), self.scores.tolist()
        for node, (parent, depth, score) in enumerate(zip(parents, depths, scores, strict=True)):
            # NaN fails these comparisons.
            if parent == ROOT:
                if depth == 1 and score <= 0.0:
                    continue
            elif not 0 <= parent < node:
                return f"a parent must precede its child, but node {node} has {parent}"
            elif depth == depths[parent] + 1 and score <= scores[parent]:
                continue
            if depth != (1 if parent == ROOT else depths[parent] + 1):
                return f"a node is one deeper than its parent, but node {node} has {depth}"
            return f"no node scores more than its parent, but node {node} has {score}"
        if num_nodes and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            node = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
            invariant = f"tokens are not negative and below {vocab_size}"
            return f"{invariant}, but node {node} has {tokens[node]}"
        if len(set(zip(parents, tokens, strict=True))) != num_nodes:
            keys = list(zip(parents, tokens, strict=True))
            node = next(i for i, key in enumerate(keys) if key in keys[:i])
            return (
                f"siblings never repeat a token, but node {node} is a second child of node "
                f"{parents[node]} with token {tokens[node]}"
            )
        return None

    def validate(self, vocab_size: int = 1 << 62) -> None:
        """Raises a ValueError if the tree has a `fault`."""
        if (fault := self.fault(vocab_size)) is not None:
            raise ValueError(f"DraftTree: {fault}")


def as_scores(scores: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Returns cumulative log-probabilities [N] as float32; overflow of masked tokens gives -inf."""
    with np.errstate(over="ignore"):
        return np.asarray(scores, dtype=np.float64).astype(np.float32)
