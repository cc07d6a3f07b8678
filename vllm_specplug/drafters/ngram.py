# SPDX-License-Identifier: Apache-2.0
"""Drafting by looking up what followed the same few tokens earlier in the request.

The idea of prompt lookup and of TokenSwift's token reuse, with branches merged into one tree
instead of verified side by side, and with probabilities learned while serving: each proposed
branch is later compared with what the target really produced, so that n-gram nodes and a head's
nodes can compete for one budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_specplug.drafters.base import (
    CommittedTokens,
    DraftCacheSpec,
    Drafter,
    DrafterOptions,
    DraftRequests,
    TargetWeights,
)
from vllm_specplug.kernels import NgramIndex, make_ngram_index
from vllm_specplug.tree import DraftTree, merge_trees

# Longest suffix that is looked up.
MAX_SUFFIX = 4


@dataclass
class BranchStatistics:
    """How often tokens of branches turned out right, by matched length and depth.

    Counts start as a prior and decay, so that the estimate follows the traffic.
    """

    decay: float = 0.995
    # (suffix length, rank among the branches, depth up to a limit) -> [right, asked]
    _counts: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)

    _PRIOR = {2: 0.3, 3: 0.5, 4: 0.65}
    _LONGEST = 0.7
    _LOWER_RANK = 0.4
    _DEEPER = 0.75
    _WEIGHT = 8.0
    _MAX_DEPTH = 6
    _MAX_RANK = 2

    def _entry(self, size: int, rank: int, depth: int) -> list[float]:
        rank = min(rank, self._MAX_RANK) if depth == 1 else 0
        key = (size, rank, min(depth, self._MAX_DEPTH))
        if key not in self._counts:
            prior = (
                self._PRIOR.get(size, self._LONGEST) * self._LOWER_RANK**rank
                if depth == 1
                else self._DEEPER
            )
            self._counts[key] = [prior * self._WEIGHT, self._WEIGHT]
        return self._counts[key]

    def observe(self, size: int, rank: int, branch: Sequence[int], actual: Sequence[int]) -> None:
        """Compares a branch with what followed; stops at its first wrong token."""
        for depth, (proposed, token) in enumerate(zip(branch, actual, strict=False), 1):
            entry = self._entry(size, rank, depth)
            entry[0] = entry[0] * self.decay + (proposed == token)
            entry[1] = entry[1] * self.decay + 1.0
            if proposed != token:
                return

    def scores(self, size: int, rank: int, length: int) -> np.ndarray:
        """Cumulative log-probabilities of a branch's nodes, float32 [length]."""
        logs = []
        for depth in range(1, min(length, self._MAX_DEPTH) + 1):
            right, asked = self._entry(size, rank, depth)
            logs.append(math.log(min(max(right / asked, 1e-3), 0.999)))
        # Deeper ones share an entry.
        logs += logs[-1:] * (length - len(logs))
        return np.cumsum(logs).astype(np.float32)


class NgramBranches:
    """N-gram branches for every running request."""

    def __init__(self, count: int, max_length: int, suffix: int = MAX_SUFFIX) -> None:
        self.count = count
        self.suffix = suffix
        self.max_length = max_length
        self.statistics = BranchStatistics()
        self._indices: dict[str, NgramIndex] = {}
        # Branches proposed last, by request, with the position of their first token.
        self._pending: dict[str, tuple[int, list[tuple[int, list[int]]]]] = {}
        # What `branches` last returned, by request, with the arguments it was for.
        self._latest: dict[str, tuple[tuple[int, int], list[DraftTree]]] = {}

    def branches(self, req_id: str, tokens: np.ndarray, depth: int) -> list[DraftTree]:
        """Chains that may follow `tokens` [n], the request's committed tokens."""
        asked = (len(tokens), depth)
        if req_id in self._latest and self._latest[req_id][0] == asked:
            return self._latest[req_id][1]
        index = self._indices.get(req_id)
        if index is None or index.num_tokens > len(tokens):
            index = self._indices[req_id] = make_ngram_index(self.suffix)
            self._pending.pop(req_id, None)
            self._latest.pop(req_id, None)
        self._learn(req_id, tokens)
        found = index.look_up(tokens, self.count, min(depth, self.max_length))
        self._pending[req_id] = (len(tokens), found)
        chains = [
            DraftTree.chain(branch, self.statistics.scores(size, rank, len(branch)))
            for rank, (size, branch) in enumerate(found)
        ]
        self._latest[req_id] = (asked, chains)
        return chains

    def look_up(self, requests: DraftRequests) -> list[DraftTree]:
        """One tree per request, of branches alone; empty where only a chain is wanted."""
        trees = []
        for r, req_id in enumerate(requests.req_ids):
            branches = []
            if requests.widths[r] > 1:
                branches = self.branches(req_id, requests.token_ids[r], requests.depths[r])
            trees.append(
                merge_trees(branches, requests.budgets[r]) if branches else DraftTree.empty()
            )
        return trees

    def added_to(self, trees: Sequence[DraftTree], requests: DraftRequests) -> list[DraftTree]:
        """The trees [R] with branches merged in, within budget; chains stay as they are."""
        merged = list(trees)
        for r, tree in enumerate(trees):
            if requests.widths[r] > 1:
                branches = self.branches(
                    requests.req_ids[r], requests.token_ids[r], requests.depths[r]
                )
                merged[r] = merge_trees([tree, *branches], requests.budgets[r])
        return merged

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops finished requests."""
        for req_id in req_ids:
            self._indices.pop(req_id, None)
            self._pending.pop(req_id, None)
            self._latest.pop(req_id, None)

    def _learn(self, req_id: str, tokens: np.ndarray) -> None:
        position, found = self._pending.pop(req_id, (0, []))
        actual = tokens[position : position + self.max_length].tolist()
        for rank, (size, branch) in enumerate(found):
            self.statistics.observe(size, rank, branch, actual)


def ngram_branches(options: DrafterOptions) -> NgramBranches | None:
    """The branches a drafter adds to its own trees; None where it adds none."""
    if not options.ngram_topk:
        return None
    return NgramBranches(options.ngram_topk, options.max_depth, options.ngram_size)


class NgramTreeDrafter(Drafter):
    """Method `ngram_tree`: n-gram branches alone, no head and no draft forward."""

    def load(self, target: TargetWeights) -> None:
        self.ngrams = NgramBranches(
            self.options.ngram_topk, self.options.max_depth, self.options.ngram_size
        )

    def cache_specs(self) -> list[DraftCacheSpec]:
        return []

    def observe(self, committed: CommittedTokens) -> None:
        pass

    def forget(self, req_ids: Iterable[str]) -> None:
        self.ngrams.forget(req_ids)

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        trees = []
        for r in range(len(requests)):
            branches = self.ngrams.branches(
                requests.req_ids[r], requests.token_ids[r], requests.depths[r]
            )
            if requests.widths[r] == 1:
                branches = branches[:1]
            trees.append(
                merge_trees(branches, requests.budgets[r]) if branches else DraftTree.empty()
            )
        return trees
