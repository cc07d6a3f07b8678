# SPDX-License-Identifier: Apache-2.0
"""Drafters that add n-gram branches to their trees."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_specplug.drafting.drafter import Drafter
from vllm_specplug.drafting.ngram import NgramBranches
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.tree import DraftTree


class BranchDrafter(Drafter):
    """A drafter whose trees include n-gram branches. Subclasses set `ngrams` in `load`."""

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
        # A chain includes no branches.
        return self.ngrams if self.options.tree_width > 1 else None
