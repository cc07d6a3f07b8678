# SPDX-License-Identifier: Apache-2.0
"""What followed a request's last few tokens earlier in it: hash tables in C++, readable in Python.

Both give the same answers, whatever their hashes are seeded with, and both look at no more than
`MAX_OCCURRENCES` places per suffix length, whatever the text. Per token and suffix length the
compiled index keeps 4 bytes for links and 8 for its tables; it reads the tokens where they lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

import numpy as np
import torch

from .extension import has_cpu_extension

MIN_SUFFIX = 1
"""Shortest suffix that is looked up."""
MAX_OCCURRENCES = 4
"""Occurrences of one suffix that are looked at, the latest ones."""

_FIRST_CAPACITY = 1024


class NgramIndex(ABC):
    """Where each short suffix occurred in one request's tokens; grows with them.

    Args:
        longest: longest suffix that is looked up.
    """

    def __init__(self, longest: int) -> None:
        assert longest >= MIN_SUFFIX, longest
        self.longest = longest
        self.num_tokens = 0
        """Tokens taken in."""

    @abstractmethod
    def look_up(
        self,
        # [n], the request's tokens; those of the last call and perhaps more
        tokens: np.ndarray,
        count: int,
        length: int,
    ) -> list[tuple[int, list[int]]]:
        """Takes in the new tokens and finds what may follow them.

        A continuation that reaches the end of the tokens goes on with itself, as periodic text
        does.

        Returns:
            At most `count` (matched suffix length, `length` tokens) pairs with different tokens,
            longer matches first, then later occurrences.
        """


class NgramIndexReference(NgramIndex):
    """In Python; some ten times the memory and the time."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        self._tokens: list[int] = []
        # One map per suffix length, longest first: suffix -> ends of its latest occurrences. Python
        # seeds the hash of bytes per process; that of a tuple of numbers anybody can compute.
        self._ends: list[dict[bytes, list[int]]] = [{} for _ in range(longest, MIN_SUFFIX - 1, -1)]

    def look_up(self, tokens: np.ndarray, count: int, length: int) -> list[tuple[int, list[int]]]:
        history = self._tokens
        for token in tokens[self.num_tokens :].tolist():
            history.append(token)
            end = len(history)
            for level, ends in enumerate(self._ends):
                size = self.longest - level
                if end >= size:
                    places = ends.setdefault(_key(history[end - size :]), [])
                    places.append(end)
                    # The last one is the suffix that is looked up.
                    del places[: -MAX_OCCURRENCES - 1]
        end = self.num_tokens = len(history)
        found: list[tuple[int, list[int]]] = []
        for level, ends in enumerate(self._ends):
            size = self.longest - level
            if end < size:
                continue
            for place in reversed(ends[_key(history[end - size :])][:-1]):
                if len(found) == count or not length:
                    return found
                period = end - place
                branch = history[place : place + length]
                while len(branch) < length:
                    branch.append(branch[len(branch) - period])
                if all(branch != other for _, other in found):
                    found.append((size, branch))
        return found


def _key(suffix: list[int]) -> bytes:
    return array("q", suffix).tobytes()


class CompiledNgramIndex(NgramIndex):
    """In C++."""

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

    def look_up(self, tokens: np.ndarray, count: int, length: int) -> list[tuple[int, list[int]]]:
        if len(tokens) > self._links.shape[1]:
            # Indexed anew, which costs less than reading the tokens has.
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
        return list(zip(sizes[:rows].tolist(), found[:rows].tolist(), strict=True))


def make_ngram_index(longest: int) -> NgramIndex:
    """The index of one request, compiled where the kernels are."""
    is_compiled = has_cpu_extension()
    return CompiledNgramIndex(longest) if is_compiled else NgramIndexReference(longest)
