# SPDX-License-Identifier: Apache-2.0
"""The order in which a run reads sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Subset


class DataOrder:
    """Endless shuffled order over a collection, to which sequences may be appended.

    An epoch is a permutation of its first `size` sequences, drawn from (seed, epoch).
    """

    def __init__(self, store: Sized, seed: int):
        self.store, self.seed = store, seed
        self.epoch, self.cursor, self.size = 0, 0, len(store)
        self._order: list[int] | None = None

    def state(self) -> dict[str, int]:
        """Returns the state for `restore`."""
        return {"epoch": self.epoch, "cursor": self.cursor, "size": self.size}

    def restore(self, state: dict[str, int]) -> None:
        """Continues from a state."""
        if state["size"] > len(self.store):
            raise ValueError(
                f"the checkpoint saw {state['size']} sequences, the data "
                f"folder holds {len(self.store)}; resume with the folder it was made with"
            )
        self.epoch, self.cursor, self.size = state["epoch"], state["cursor"], state["size"]
        self._order = None

    def __next__(self) -> int:
        if self.cursor >= self.size:
            self.epoch, self.cursor, self.size = self.epoch + 1, 0, len(self.store)
            self._order = None
        if self._order is None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            self._order = torch.randperm(self.size, generator=generator).tolist()
        self.cursor += 1
        return self._order[self.cursor - 1]

    def __iter__(self) -> Iterator[int]:
        return self


def random_subset(values: torch.Tensor, limit: int, generator: torch.Generator) -> torch.Tensor:
    """Returns at most `limit` of `values` [A], drawn without replacement, in their order.

    The first values would favour the beginning of an answer.
    """
    if len(values) <= limit:
        return values
    kept = torch.randperm(len(values), generator=generator)[:limit]
    return values[kept.sort().values]


def evenly_spread(store: Any, count: int) -> Any:
    """Returns `count` sequences of a store at equal distances, or all of a smaller one, as a lazy
    sequence."""
    return Subset(store, range(0, len(store), max(1, len(store) // count))[:count])
