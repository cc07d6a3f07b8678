# SPDX-License-Identifier: Apache-2.0
"""N-gram index of a request's tokens: hash tables in C++, and lookups in Python.

`lookup` returns whole continuations of the text. `graft` adds next tokens below every node of a
tree; only the compiled index has it.

Both implementations return the same results for every hash seed. Both examine at most
`MAX_OCCURRENCES` positions per suffix length. The compiled index needs 12 bytes per token and
suffix length (4 for links, 8 for tables) and does not copy the tokens.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod

import numpy as np
import torch

from .extension import has_cpu_extension
from .tree_tensors import empty_trees

MIN_SUFFIX = 1
"""Length of the shortest suffix in lookups."""
MAX_OCCURRENCES = 4
"""Number of latest occurrences of a suffix to examine."""

_FIRST_CAPACITY = 1024
# A tree: tokens int64, parents int32 (-1: the root), depths int32 and scores float32, [M] each.
TreeArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class NgramIndex(ABC):
    """The positions of every short suffix in a request's tokens. It grows with the tokens.

    Args:
        longest: length of the longest suffix in lookups.
    """

    def __init__(self, longest: int) -> None:
        assert longest >= MIN_SUFFIX, longest
        self.longest = longest
        self.num_tokens = 0
        """Number of indexed tokens."""

    @abstractmethod
    def lookup(
        self,
        # [n], the request's tokens: those of the last call, possibly followed by more
        tokens: np.ndarray,
        count: int,
        length: int,
        vocab_size: int = 1 << 31,
    ) -> list[tuple[int, list[int]]]:
        """Indexes the new tokens and returns candidate continuations.

        A continuation that reaches the end of the tokens repeats itself, like periodic text.

        Returns:
            At most `count` (matched suffix length, `length` tokens) pairs with different tokens,
            longer matches first, then later occurrences. A continuation ends before the first
            token id >= `vocab_size`, so it may be empty.
        """

    can_graft = False
    """Whether `graft` is implemented."""

    def graft(
        self,
        # [n], the tokens of the last `lookup`
        tokens: np.ndarray,
        tree: TreeArrays,
        # float32 [longest + 1]
        shares: np.ndarray,
        width: int,
        depth: int,
        budget: int,
        vocab_size: int = 1 << 31,
    ) -> TreeArrays | None:
        """Returns the best-first tree over a drafter's tree and continuations of its paths in the
        text.

        At every node, also at added ones, the text with the node's path is looked up: the longest
        suffix with earlier occurrences, of which the latest are used. If it has s tokens, a child's
        probability is

        (1 - shares[s]) * probability in the tree + shares[s] * share of the occurrences

        so a token of both sources scores higher. A node's score is the sum of the logarithms along
        its path. A node of the text only is dropped if its probability is below 1/256.

        Args:
            tree: parents come before children, scores are cumulative log-probabilities.
            shares: share of right continuations of a suffix of s tokens.
            width: limit of the children of a node from the text.
            depth: limit of the depth of added nodes.
            budget: most nodes.
            vocab_size: larger token ids of the text are not proposed.

        Returns:
            Nodes by descending score. None for a malformed tree: arrays of other types or lengths,
            a parent after its child, a score that is NaN or above its parent's.
        """
        raise NotImplementedError


class NgramIndexReference(NgramIndex):
    """Lookups in Python: each searches all tokens."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        # The tokens of a call.
        self._tokens = np.empty(0, np.int32)

    def lookup(
        self, tokens: np.ndarray, count: int, length: int, vocab_size: int = 1 << 31
    ) -> list[tuple[int, list[int]]]:
        self._tokens, self.num_tokens = tokens, len(tokens)
        history, end = tokens.tolist(), len(tokens)
        found: list[tuple[int, list[int]]] = []
        for size in range(min(self.longest, end), MIN_SUFFIX - 1, -1):
            # The last occurrence is the suffix itself.
            for position in reversed(self._ends_of(history[end - size :])[:-1]):
                if len(found) == count or not length:
                    return _within(found, vocab_size)
                period = end - position
                branch = history[position : position + length]
                while len(branch) < length:
                    branch.append(branch[len(branch) - period])
                if all(branch != other for _, other in found):
                    found.append((size, branch))
        return _within(found, vocab_size)

    def _ends_of(self, suffix: list[int]) -> list[int]:
        """Returns the ends of the latest occurrences in the tokens, with one more than
        `MAX_OCCURRENCES`."""
        size, count = len(suffix), len(self._tokens) - len(suffix) + 1
        if count <= 0:
            return []
        is_here = np.ones(count, bool)
        for i, token in enumerate(suffix):
            is_here &= self._tokens[i : i + count] == token
        return (np.flatnonzero(is_here)[-MAX_OCCURRENCES - 1 :] + size).tolist()


def _within(found: list[tuple[int, list[int]]], vocab_size: int) -> list[tuple[int, list[int]]]:
    """Truncates branches before their first token id >= `vocab_size`."""
    return [
        (size, list(itertools.takewhile(lambda token: token < vocab_size, branch)))
        for size, branch in found
    ]


def _is_typed(tree: TreeArrays) -> bool:
    """Whether the arrays have the dtypes and lengths of `TreeArrays`."""
    kinds = (np.int64, np.int32, np.int32, np.float32)
    return all(
        array.dtype == kind and array.shape == (len(tree[0]),)
        for array, kind in zip(tree, kinds, strict=True)
    )


class CompiledNgramIndex(NgramIndex):
    """The compiled implementation."""

    can_graft = True

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        self._allocate(_FIRST_CAPACITY)

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return 4 * (self._links.numel() + self._heads.numel())

    def _allocate(self, capacity: int) -> None:
        levels = self.longest - MIN_SUFFIX + 1
        # int32 [levels, capacity]: end of the suffix's previous occurrence
        self._links = torch.zeros((levels, capacity), dtype=torch.int32)
        # int32 [levels, 2 * capacity]: end of the latest occurrence of each suffix; 0 for none
        self._heads = torch.zeros((levels, 2 * capacity), dtype=torch.int32)
        self.num_tokens = 0

    def lookup(
        self, tokens: np.ndarray, count: int, length: int, vocab_size: int = 1 << 31
    ) -> list[tuple[int, list[int]]]:
        if len(tokens) > self._links.shape[1]:
            # Indexing again costs less than reading the tokens did.
            self._allocate(1 << (len(tokens) - 1).bit_length())
        sizes = torch.empty(count, dtype=torch.int32)
        found = torch.empty((count, length), dtype=torch.int32)
        rows = torch.ops.specplug.ngram_lookup.default(
            torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int32)),
            self._links,
            self._heads,
            self.num_tokens,
            self.longest,
            sizes,
            found,
        )
        self.num_tokens = len(tokens)
        branches = list(zip(sizes[:rows].tolist(), found[:rows].tolist(), strict=True))
        if rows and int(found[:rows].max()) >= vocab_size:
            branches = _within(branches, vocab_size)
        return branches

    def graft(
        self,
        tokens: np.ndarray,
        tree: TreeArrays,
        shares: np.ndarray,
        width: int,
        depth: int,
        budget: int,
        vocab_size: int = 1 << 31,
    ) -> TreeArrays | None:
        if not _is_typed(tree):
            return None
        assert len(tokens) == self.num_tokens
        ids, parents, _, scores = (torch.from_numpy(np.ascontiguousarray(part)) for part in tree)
        *out, _ = empty_trees(budget)
        nodes = torch.ops.specplug.ngram_graft.default(
            torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int32)),
            self._links,
            self._heads,
            self.longest,
            torch.from_numpy(shares),
            width,
            depth,
            vocab_size,
            ids,
            parents,
            scores,
            *out,
        )
        if nodes < 0:
            return None
        token_ids, at_nodes, depths, totals = (part[:nodes].numpy() for part in out)
        return token_ids, at_nodes, depths, totals


def make_ngram_index(longest: int) -> NgramIndex:
    """Makes the index of a request, compiled if the kernels are."""
    is_compiled = has_cpu_extension()
    return CompiledNgramIndex(longest) if is_compiled else NgramIndexReference(longest)
