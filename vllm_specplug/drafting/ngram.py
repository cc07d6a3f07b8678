# SPDX-License-Identifier: Apache-2.0
"""Drafting by looking up what followed the same few tokens earlier in the request.

The idea of prompt lookup and of TokenSwift's token reuse, with branches merged into one tree
instead of verified side by side, and with probabilities learned while serving: each proposed
branch is later compared with what the target really produced, so that n-gram nodes and a head's
nodes can compete for one budget. In a head's tree every node is looked up, not only the root, and
head and text are mixed there as two predictors of the same token (`kernels.NgramIndex.graft`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_specplug.drafting.drafter import DrafterOptions
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.tree import DraftTree, merge_trees

if TYPE_CHECKING:
    from vllm_specplug.kernels import NgramIndex

# Longest suffix that is looked up.
MAX_SUFFIX = 4


class BranchStatistics:
    """How often tokens of branches turned out right, by matched length and depth.

    Counts start as a prior and decay, so that the estimate follows the traffic.
    """

    _DECAY = 0.995
    # Observations that the prior is worth.
    _WEIGHT = 8.0
    # Shares of right tokens in answers to chat, code and maths prompts, for suffixes of 1, 2, ...
    # tokens; longer ones are taken to be like the last. Of a branch's first token:
    _FIRST = (0.24, 0.55, 0.6, 0.8)
    # ... times this for each branch before it:
    _LOWER_RANK = 0.85
    # Of a token whose predecessors were right:
    _LATER = (0.55, 0.65, 0.7, 0.87)
    _RANKS = 3
    _DEPTHS = 10
    # A branch ends where its next node would be right too seldom for any budget.
    _MIN_SCORE = math.log(1 / 256)

    def __init__(self) -> None:
        # By suffix length: weights of the right ones and of all, and the logarithm of the share,
        # [_RANKS + _DEPTHS - 1] each: of first tokens by rank among the branches, the last rank
        # for all further ones, then of deeper tokens.
        self._counts: dict[int, tuple[list[float], list[float], list[float]]] = {}
        # By suffix length, until its counts change: scores by rank and longest branch.
        self._scores: dict[int, dict[tuple[int, int], np.ndarray]] = {}
        self.observed = 0
        """Branches that were compared."""

    def _counts_of(self, size: int) -> tuple[list[float], list[float], list[float]]:
        counts = self._counts.get(size)
        if counts is None:
            index = min(size, len(self._FIRST)) - 1
            shares = [self._FIRST[index] * self._LOWER_RANK**rank for rank in range(self._RANKS)]
            shares += [self._LATER[index]] * (self._DEPTHS - 1)
            counts = self._counts[size] = (
                [share * self._WEIGHT for share in shares],
                [self._WEIGHT] * len(shares),
                [math.log(share) for share in shares],
            )
        return counts

    def observe(self, size: int, rank: int, branch: Sequence[int], actual: Sequence[int]) -> None:
        """Compares a branch with what followed; stops at its first wrong token."""
        right, asked, logs = self._counts_of(size)
        self._scores.pop(size, None)
        self.observed += 1
        column = min(rank, self._RANKS - 1)
        for depth, (proposed, token) in enumerate(zip(branch, actual, strict=False), 1):
            if depth > 1:
                column = self._RANKS - 2 + min(depth, self._DEPTHS)
            right[column] = right[column] * self._DECAY + (proposed == token)
            asked[column] = asked[column] * self._DECAY + 1.0
            logs[column] = math.log(min(max(right[column] / asked[column], 1e-3), 0.999))
            if proposed != token:
                return

    def scores(self, size: int, rank: int, length: int) -> np.ndarray:
        """Cumulative log-probabilities of a branch's nodes, float32 [at most length]: those that
        are not too improbable for any budget, and the first one."""
        rank = min(rank, self._RANKS - 1)
        by_rank = self._scores.setdefault(size, {})
        known = by_rank.get((rank, length))
        if known is None:
            logs = self._counts_of(size)[2]
            # Tokens deeper than is counted are like the deepest counted ones.
            deeper = itertools.chain(logs[self._RANKS :], itertools.repeat(logs[-1]))
            totals = itertools.accumulate(deeper, initial=logs[rank])
            likely = itertools.takewhile(lambda total: total >= self._MIN_SCORE, totals)
            listed = list(itertools.islice(likely, length)) or logs[rank : rank + 1]
            known = by_rank[rank, length] = np.array(listed, dtype=np.float32)
        return known

    def shares(self, longest: int) -> np.ndarray:
        """How often the first token after a suffix of 0, 1, .. `longest` tokens is right, float32
        [longest + 1]; never certain, so that a head's nodes keep some probability."""
        firsts = (math.exp(self._counts_of(size)[2][0]) for size in range(1, longest + 1))
        return np.array([0.0, *(min(first, 0.999) for first in firsts)], np.float32)

    def table(self, longest: int, length: int) -> np.ndarray:
        """`scores` of every suffix length up to `longest` and of every rank that is told apart,
        float32 [longest, ranks, length]; -inf past their ends."""
        table = np.full((longest, self._RANKS, length), -np.inf, np.float32)
        for size in range(1, longest + 1):
            for rank in range(self._RANKS):
                scores = self.scores(size, rank, length)
                table[size - 1, rank, : len(scores)] = scores
        return table


class NgramBranches:
    """N-gram branches for every running request."""

    def __init__(
        self, count: int, max_length: int, suffix: int = MAX_SUFFIX, vocab_size: int = 1 << 31
    ) -> None:
        self.count = count
        self.vocab_size = vocab_size
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
            from vllm_specplug.kernels import make_ngram_index

            index = self._indices[req_id] = make_ngram_index(self.suffix)
            self._pending.pop(req_id, None)
            self._latest.pop(req_id, None)
        self._learn(req_id, tokens)
        found = index.lookup(tokens, self.count, min(depth, self.max_length), self.vocab_size)
        found = [(size, branch) for size, branch in found if branch]
        self._pending[req_id] = (len(tokens), found)
        chains = [
            DraftTree.chain(branch[: len(scores)], scores)
            for rank, (size, branch) in enumerate(found)
            for scores in [self.statistics.scores(size, rank, len(branch))]
        ]
        self._latest[req_id] = (asked, chains)
        return chains

    def lookup(self, requests: DraftRequests) -> list[DraftTree]:
        """One tree per request, of branches only; empty where only a chain is wanted."""
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
        """The trees [R] with what followed their paths in the text, within budget; chains stay as
        they are, and so do trees that are none, for `DraftTree.is_valid` to find."""
        merged = list(trees)
        shares = self.statistics.shares(self.suffix)
        for r, tree in enumerate(trees):
            if requests.widths[r] > 1:
                req_id, tokens = requests.req_ids[r], requests.token_ids[r]
                # Also takes in the tokens, and remembers the branches to learn from them.
                self.branches(req_id, tokens, requests.depths[r])
                grafted = self._indices[req_id].graft(
                    tokens,
                    (tree.token_ids, tree.parent_indices, tree.depths, tree.scores),
                    shares,
                    self.count,
                    min(requests.depths[r], self.max_length),
                    requests.budgets[r],
                    self.vocab_size,
                )
                if grafted is not None:
                    merged[r] = DraftTree(*grafted)
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
    return NgramBranches(options.ngram_topk, options.max_depth, vocab_size=options.vocab_size)
