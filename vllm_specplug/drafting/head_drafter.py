# SPDX-License-Identifier: Apache-2.0
"""What drafters that run their head level by level share: n-gram branches beside its trees."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from vllm_specplug.drafting.drafter import Drafter, DraftRequests
from vllm_specplug.drafting.ngram import NgramBranches
from vllm_specplug.tree import DraftTree


class HeadDrafter(Drafter):
    """A drafter whose head is run once for each level, for the requests that want it.

    Subclasses set `ngrams` in `load`.
    """

    drafts_by_level: ClassVar[bool] = True

    ngrams: NgramBranches | None

    @abstractmethod
    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        """The head's own trees; at least one request."""

    def forget(self, req_ids: Iterable[str]) -> None:
        if self.ngrams is not None:
            self.ngrams.forget(req_ids)

    @property
    def forward_depth(self) -> int:
        return self.options.tree_depth

    def look_up(self, requests: DraftRequests) -> list[DraftTree]:
        if self.ngrams is None:
            return super().look_up(requests)
        return self.ngrams.look_up(requests)

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(requests)
        chosen, drafted = requests.for_forward()
        if chosen:
            for r, tree in zip(chosen, self.draft(drafted), strict=True):
                trees[r] = tree
        return trees if self.ngrams is None else self.ngrams.added_to(trees, requests)
