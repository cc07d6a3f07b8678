# SPDX-License-Identifier: Apache-2.0
"""Drafts trees of n-gram branches from the request's own text, without a draft forward."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.drafter import Drafter, TargetWeights
from vllm_specplug.drafting.ngram import NgramBranches
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.tree import DraftTree


class NgramTreeDrafter(Drafter):
    """Drafter of method `ngram_tree`."""

    reads_target_weights = False
    drafts_on_device = True

    def load(self, target: TargetWeights) -> None:
        options = self.options
        self.ngrams = NgramBranches(
            options.ngram_topk, options.max_depth, vocab_size=options.vocab_size
        )

    def observe(self, committed: CommittedTokens) -> None:
        pass

    def forget(self, req_ids: Iterable[str]) -> None:
        self.ngrams.forget(req_ids)

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        return self.ngrams.lookup(requests, chains=True)

    @property
    def device_branches(self) -> NgramBranches | None:
        return self.ngrams

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees | None:
        return None
