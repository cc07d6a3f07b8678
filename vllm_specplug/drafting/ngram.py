# SPDX-License-Identifier: Apache-2.0
"""Drafts the tokens that followed the same n-gram earlier in the request.

The idea is known from prompt lookup and TokenSwift's token reuse. Here branches are merged into one
tree instead of being verified side by side. Their probabilities are learned while serving, so that
n-gram nodes and a head's nodes can compete for one budget: each branch is later compared with the
target's tokens. In a head's tree every node is looked up, not only the root, and head and text are
mixed as two predictors of the same token (`kernels.NgramIndex.graft`).
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

# Maximum length of a suffix that is looked up.
MAX_SUFFIX = 4


class BranchStatistics:
    """Acceptance rates of branch tokens, by matched length and depth.

    Counts start as a prior and decay, so the estimate follows the traffic.
    """

    _DECAY = 0.995
    # Weight of the prior, in observations.
    _PRIOR_WEIGHT = 8.0
    # Measured rates in answers to chat, code and maths prompts, for suffixes of 1, 2, ... tokens;
    # longer suffixes use the last entry. Rate of the first token of the best branch:
    _FIRST = (0.24, 0.55, 0.6, 0.8)
    # ... multiplied by this for each better branch:
    _RANK_FACTOR = 0.85
    # Rate of a token whose predecessors were right:
    _LATER = (0.55, 0.65, 0.7, 0.87)
    _RANKS = 3
    _DEPTHS = 10
    # A branch ends before a node that is too improbable for any budget.
    _MIN_SCORE = math.log(1 / 256)

    def __init__(self) -> None:
        # By suffix length: decayed counts of right tokens and of all tokens, and the logarithm of
        # the rate. Each list is [_RANKS + _DEPTHS - 1]: first tokens by rank of the branch, where
        # the last rank stands for all further ones, then deeper tokens.
        self._counts: dict[int, tuple[list[float], list[float], list[float]]] = {}
        # By suffix length, until its counts change: scores by rank and maximum length.
        self._scores: dict[int, dict[tuple[int, int], np.ndarray]] = {}
        self.num_observed = 0
        """Number of branches that were compared."""

    def _counts_of(self, size: int) -> tuple[list[float], list[float], list[float]]:
        counts = self._counts.get(size)
        if counts is None:
            index = min(size, len(self._FIRST)) - 1
            rates = [self._FIRST[index] * self._RANK_FACTOR**rank for rank in range(self._RANKS)]
            rates += [self._LATER[index]] * (self._DEPTHS - 1)
            counts = self._counts[size] = (
                [rate * self._PRIOR_WEIGHT for rate in rates],
                [self._PRIOR_WEIGHT] * len(rates),
                [math.log(rate) for rate in rates],
            )
        return counts

    def observe(self, size: int, rank: int, branch: Sequence[int], actual: Sequence[int]) -> None:
        """Compares a branch with the actual tokens, up to its first wrong token."""
        num_right, num_total, log_rates = self._counts_of(size)
        self._scores.pop(size, None)
        self.num_observed += 1
        column = min(rank, self._RANKS - 1)
        for depth, (proposed, token) in enumerate(zip(branch, actual, strict=False), 1):
            if depth > 1:
                column = self._RANKS - 2 + min(depth, self._DEPTHS)
            num_right[column] = num_right[column] * self._DECAY + (proposed == token)
            num_total[column] = num_total[column] * self._DECAY + 1.0
            rate = num_right[column] / num_total[column]
            log_rates[column] = math.log(min(max(rate, 1e-3), 0.999))
            if proposed != token:
                return

    def scores(self, size: int, rank: int, length: int) -> np.ndarray:
        """Returns the cumulative log-probabilities of a branch's nodes, float32 [length or less].

        Nodes that are too improbable for any budget are left out, except the first.
        """
        rank = min(rank, self._RANKS - 1)
        cache = self._scores.setdefault(size, {})
        scores = cache.get((rank, length))
        if scores is None:
            log_rates = self._counts_of(size)[2]
            # Tokens below the counted depths have the rate of the last one.
            deeper = itertools.chain(log_rates[self._RANKS :], itertools.repeat(log_rates[-1]))
            totals = itertools.accumulate(deeper, initial=log_rates[rank])
            likely = itertools.takewhile(lambda total: total >= self._MIN_SCORE, totals)
            listed = list(itertools.islice(likely, length)) or log_rates[rank : rank + 1]
            scores = cache[rank, length] = np.array(listed, dtype=np.float32)
        return scores

    def first_token_rates(self, max_suffix: int) -> np.ndarray:
        """Returns the rate of the first token after a suffix of 0, 1, ..., `max_suffix` tokens,
        float32 [max_suffix + 1].

        It is below 1, so that a head's nodes keep some probability.
        """
        rates = (math.exp(self._counts_of(size)[2][0]) for size in range(1, max_suffix + 1))
        return np.array([0.0, *(min(rate, 0.999) for rate in rates)], np.float32)

    def table(self, max_suffix: int, length: int) -> np.ndarray:
        """Returns the `scores` of every suffix length and rank, float32 [max_suffix, ranks,
        length]; -inf past their ends."""
        table = np.full((max_suffix, self._RANKS, length), -np.inf, np.float32)
        for size in range(1, max_suffix + 1):
            for rank in range(self._RANKS):
                scores = self.scores(size, rank, length)
                table[size - 1, rank, : len(scores)] = scores
        return table


class NgramBranches:
    """N-gram branches for every running request."""

    def __init__(self, count: int, max_length: int, vocab_size: int = 1 << 31) -> None:
        self.count = count
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.statistics = BranchStatistics()
        self._indices: dict[str, NgramIndex] = {}
        # By request: its last branches, with the position of their first token.
        self._pending: dict[str, tuple[int, list[tuple[int, list[int]]]]] = {}
        # By request: the last result of `branches`, with its arguments.
        self._latest: dict[str, tuple[tuple[int, int], list[DraftTree]]] = {}

    def branches(self, req_id: str, tokens: np.ndarray, depth: int) -> list[DraftTree]:
        """Returns chains that may follow `tokens` [n], the request's committed tokens."""
        arguments = (len(tokens), depth)
        if req_id in self._latest and self._latest[req_id][0] == arguments:
            return self._latest[req_id][1]
        index = self._indices.get(req_id)
        if index is None or index.num_tokens > len(tokens):
            from vllm_specplug.kernels import make_ngram_index

            index = self._indices[req_id] = make_ngram_index(MAX_SUFFIX)
            self._pending.pop(req_id, None)
            self._latest.pop(req_id, None)
        self._learn(req_id, tokens)
        matches = index.lookup(tokens, self.count, min(depth, self.max_length), self.vocab_size)
        matches = [(size, branch) for size, branch in matches if branch]
        self._pending[req_id] = (len(tokens), matches)
        chains = [
            DraftTree.chain(branch[: len(scores)], scores)
            for rank, (size, branch) in enumerate(matches)
            for scores in [self.statistics.scores(size, rank, len(branch))]
        ]
        self._latest[req_id] = (arguments, chains)
        return chains

    def lookup(self, requests: DraftRequests, *, chains: bool = False) -> list[DraftTree]:
        """Returns one tree of branches per request. For a request that wants a chain it is the best
        branch if `chains`, else empty."""
        count = self.count if requests.width > 1 else int(chains)
        if not count:
            return [DraftTree.empty()] * len(requests)
        trees = []
        for r, req_id in enumerate(requests.req_ids):
            branches = self.branches(req_id, requests.token_ids[r], requests.depths[r])
            trees.append(merge_trees(branches[:count], requests.budgets[r]))
        return trees

    def add_to(self, trees: Sequence[DraftTree], requests: DraftRequests) -> list[DraftTree]:
        """Returns the trees [R] with the n-gram continuations of their paths, within the budgets.
        Without compiled kernels only continuations of the text itself are added.

        Chains and malformed trees (see `DraftTree.fault`) are returned unchanged.
        """
        merged = list(trees)
        if requests.width == 1:
            return merged
        rates = self.statistics.first_token_rates(MAX_SUFFIX)
        for r, tree in enumerate(trees):
            req_id, tokens = requests.req_ids[r], requests.token_ids[r]
            # Also updates the index, and keeps the branches for `_learn`.
            branches = self.branches(req_id, tokens, requests.depths[r])
            index = self._indices[req_id]
            if not index.can_graft:
                if tree.fault(self.vocab_size) is None:
                    merged[r] = merge_trees([tree, *branches], requests.budgets[r])
                continue
            grafted = index.graft(
                tokens,
                (tree.token_ids, tree.parent_indices, tree.depths, tree.scores),
                rates,
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
        position, matches = self._pending.pop(req_id, (0, []))
        actual = tokens[position : position + self.max_length].tolist()
        for rank, (size, branch) in enumerate(matches):
            self.statistics.observe(size, rank, branch, actual)


def ngram_branches(options: DrafterOptions) -> NgramBranches | None:
    """Returns the branches that a drafter adds to its trees; None if `ngram_topk` is 0."""
    if not options.ngram_topk:
        return None
    return NgramBranches(options.ngram_topk, options.max_depth, vocab_size=options.vocab_size)
