# SPDX-License-Identifier: Apache-2.0
"""What drafters with a head share: n-gram branches beside its trees, and levels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from vllm_specplug.drafting.drafter import Drafter
from vllm_specplug.drafting.ngram import NgramBranches
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import Expand, Frontier


class BranchDrafter(Drafter):
    """A drafter whose trees take in n-gram branches. Subclasses set `ngrams` in `load`."""

    ngrams: NgramBranches | None

    def forget(self, req_ids: Iterable[str]) -> None:
        if self.ngrams is not None:
            self.ngrams.forget(req_ids)

    @property
    def has_lookup(self) -> bool:
        return self.ngrams is not None

    def lookup(self, requests: DraftRequests) -> list[DraftTree]:
        if self.ngrams is None:
            return super().lookup(requests)
        return self.ngrams.lookup(requests)

    @property
    def device_branches(self) -> NgramBranches | None:
        # A chain takes in none.
        return self.ngrams if self.options.tree_width > 1 else None


class HeadDrafter(BranchDrafter):
    """A drafter whose head is run once for each level, for the requests that want it."""

    drafts_by_level: ClassVar[bool] = True

    levels_run = 0
    """Levels of the last draft: it may end before the deepest that was asked for."""

    def counted(self, expand: Expand) -> Expand:
        """`expand` of a draft that begins, whose levels are counted."""
        self.levels_run = 0

        def count(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            self.levels_run += 1
            return expand(frontier)

        return count

    @abstractmethod
    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        """The head's own trees; at least one request."""

    @property
    def forward_depth(self) -> int:
        return self.options.tree_depth

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(requests)
        chosen, drafted = requests.for_forward()
        if chosen:
            for r, tree in zip(chosen, self.draft(drafted), strict=True):
                trees[r] = tree
        return trees if self.ngrams is None else self.ngrams.added_to(trees, requests)
