# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of a block head fused with a local head (DeLS), as chains and as trees.

At depth i the backbone's logits l and the local head's scores s of the previously drafted tokens
are fused to l + alpha * s - beta * log p_unigram (DeLS-Spec: a product of experts from which the
shared prior is divided out once).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from vllm_specplug.methods.local.head import LocalHead
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import (
    AcceptanceReport,
    DraftedSequence,
    Policy,
    Rounds,
    rounds_at,
    walk_known,
)


@dataclass(frozen=True)
class LocalTables:
    """A local head with the draft vocabulary of its fusion.

    `table` [V', r] are its output rows, `log_prior` float32 [V'] the unigram prior. With
    `anchor_input` the head reads the anchor first and corrects depth 1 too.
    """

    head: LocalHead
    draft: DraftTables
    table: torch.Tensor
    log_prior: torch.Tensor
    anchor_input: bool = False

    @classmethod
    def build(
        cls,
        head: LocalHead,
        draft: DraftTables,
        log_prior: torch.Tensor,
        local_ids: torch.Tensor | None = None,
        anchor_input: bool | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> LocalTables:
        """Returns the tables of a head.

        Args:
            log_prior: [V].
            local_ids: target ids of a local head that scores a part of the vocabulary.
            anchor_input: overrides the head's config.
            dtype: of the product that computes scores.

        Raises:
            ValueError: if the local head does not score the whole draft vocabulary.
        """
        table = head.output_table(draft.lm_head)
        if head.config.lm_head_mode == "low_rank":
            table = table[head.output_rows(draft.target_ids, local_ids)]
        feed = head.config.anchor_input if anchor_input is None else anchor_input
        return cls(head, draft, table.to(dtype), log_prior[draft.target_ids], feed)

    def step(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads target ids [F] after states [F, S] and returns rank vectors [F, r] and new
        states."""
        return self.head.step(tokens, state, self.draft.embed_tokens)

    def scores(self, ranks: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the scores [..., M] of draft ids [..., M] after rank vectors [..., r]."""
        # One product with the full table is cheaper than gathering M of its rows for each vector.
        return (ranks.to(self.table.dtype) @ self.table.t()).gather(-1, rows).float()

    def prefix_ranks(self, rounds: Rounds) -> torch.Tensor:
        """Returns rank vectors [R, D, r] for each depth if all earlier drafts are right; zeros at
        depth 1 without the anchor."""
        truth = rounds.truth.clamp_min(0)
        if self.anchor_input:
            tokens = torch.cat((rounds.anchors[:, None], truth[:, :-1]), -1)
            return self.head.ranks(tokens, self.draft.embed_tokens)[0]
        read = self.head.ranks(truth[:, :-1], self.draft.embed_tokens)[0]
        return torch.cat((torch.zeros_like(read[:, :1]), read), 1)


@dataclass(frozen=True)
class Fusion:
    """Weights of the fusion, each float32 [D] with entry i - 1 for depth i."""

    alpha: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def of(
        cls, tables: LocalTables, depth: int, alpha: float | Sequence[float], beta: float | Sequence
    ) -> Fusion:
        """Returns the weights from a user's values: one for all depths, or one for each depth that
        the local head corrects (all but the first without the anchor)."""
        corrected = depth if tables.anchor_input else depth - 1

        def spread(name: str, value: float | Sequence[float]) -> torch.Tensor:
            values = [float(value)] * corrected if isinstance(value, int | float) else list(value)
            if len(values) != corrected:
                raise ValueError(
                    f"{name} has {len(values)} values, legal: 1, or {corrected} (one for each "
                    "corrected depth); correct it"
                )
            for number in values:
                if not 0 <= number < math.inf:
                    raise ValueError(f"{name} = {number}, legal: a number >= 0; correct it")
            return torch.tensor([0.0] * (depth - corrected) + values)

        return cls(spread("alpha", alpha), spread("beta", beta))


@dataclass(frozen=True)
class ChainScores:
    """Scores of DeLS chains at every anchor of a sequence, before the fusion.

    `logits` of the backbone, `scores` of the local head and `log_prior` are each [A, D, M] over the
    candidates of a slot; `is_truth` bool [A, D, M] marks the true one.
    """

    logits: torch.Tensor
    scores: torch.Tensor
    log_prior: torch.Tensor
    is_truth: torch.Tensor

    def accepted(self, fusion: Fusion) -> torch.Tensor:
        """Returns the number of accepted drafts at each anchor, int64 [A].

        A chain ends at its first wrong draft, so only scores after the true prefix matter.
        """
        fused = self.logits + fusion.alpha[:, None] * self.scores
        fused -= fusion.beta[:, None] * self.log_prior
        best = fused.argmax(-1, keepdim=True)
        return self.is_truth.gather(-1, best).squeeze(-1).long().cumprod(-1).sum(-1)


@torch.no_grad()
def chain_scores(tables: LocalTables, sequence: DraftedSequence) -> ChainScores:
    """Returns the `ChainScores` of a sequence."""
    rounds = rounds_at(sequence, torch.arange(sequence.num_anchors))
    rows = rounds.slots.rows
    scores = tables.scores(tables.prefix_ranks(rounds), rows)
    is_truth = tables.draft.target_ids[rows] == rounds.truth[..., None]
    return ChainScores(rounds.slots.logits, scores, tables.log_prior[rows], is_truth)


@torch.no_grad()
def evaluate_local_chains(
    tables: LocalTables,
    sequences: Iterable[DraftedSequence],
    fusions: dict[str, Fusion],
    report: AcceptanceReport,
) -> None:
    """Walks DeLS chains under each named fusion and counts into `report`."""
    for sequence in sequences:
        scores = chain_scores(tables, sequence)
        for name, fusion in fusions.items():
            walk_known(sequence, name, scores.accepted(fusion), report)


def local_tree_policy(tables: LocalTables, fusion: Fusion, budget: int, width: int) -> Policy:
    """Returns the policy of the best trees of `budget` nodes under the fused distributions; see
    `FusedTrees`."""

    def accepted(rounds: Rounds) -> torch.Tensor:
        return FusedTrees(tables, fusion, rounds, budget, width).matched(rounds.truth)

    return torch.no_grad()(accepted)


class FusedTrees:
    """Trees of R requests that grow depth by depth.

    Of all nodes scored so far, the `budget` best of each request are kept. The next depth grows
    only from kept nodes of the last one. Scores fall along a path, so a dropped node has no kept
    descendant, and the tree is exactly the best one.

    Nodes are rows of parallel tensors: request, parent row (-1: the root), depth, target token,
    score. `kept` marks the nodes of the final trees.

    Only a slot's candidates are scored. They share the mass that the backbone gives them together,
    as in serving.

    Args:
        width: maximum children of a node.
    """

    def __init__(
        self,
        tables: LocalTables,
        fusion: Fusion,
        rounds: Rounds,
        budget: int,
        width: int,
    ):
        self.tables, self.fusion, self.budget = tables, fusion, budget
        self.slots = rounds.slots
        count, depths, tokens = self.slots.rows.shape
        self._mass = torch.logsumexp(self.slots.log_probs, -1)
        self._width = min(width, budget, tokens)
        self.num_requests = count
        self.request = torch.zeros(0, dtype=torch.int64)
        self.parent, self.depth, self.token = (self.request.clone() for _ in range(3))
        self.score = torch.zeros(0)
        self.kept = torch.zeros(0, dtype=torch.bool)
        # frontier: request, node row and score; then local state and last token of each node
        request = torch.arange(count)
        frontier = (request, torch.full((count,), -1), torch.zeros(count))
        state, token = tables.head.initial_state(count), rounds.anchors
        for depth in range(depths):
            ranks = None
            if depth or tables.anchor_input:
                ranks, state = tables.step(token, state)
            first = len(self.request)
            parents_row = self._grow(depth, frontier, ranks)
            chosen = torch.nonzero(self.kept[first:]).flatten()
            if not len(chosen):
                break
            rows = first + chosen
            frontier = (self.request[rows], rows, self.score[rows])
            state, token = state[parents_row[chosen]], self.token[rows]

    def _grow(
        self,
        depth: int,
        frontier: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        ranks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Adds the children of the frontier and returns each new node's row of the frontier."""
        tables = self.tables
        request, parent, score = frontier
        # [F, M]
        fused, ids = self.slots.logits[request, depth], self.slots.rows[request, depth]
        if ranks is not None:
            fused = fused + self.fusion.alpha[depth] * tables.scores(ranks, ids)
            fused = fused - self.fusion.beta[depth] * tables.log_prior[ids]
        values, best = fused.topk(self._width, -1)
        values = values - torch.logsumexp(fused, -1, keepdim=True)
        values = values + self._mass[request, depth][:, None]
        best = ids.gather(-1, best)
        rows = torch.arange(len(request)).repeat_interleave(self._width)
        self.request = torch.cat((self.request, request[rows]))
        self.parent = torch.cat((self.parent, parent[rows]))
        self.depth = torch.cat((self.depth, torch.full((len(rows),), depth + 1)))
        self.token = torch.cat((self.token, tables.draft.target_ids[best.flatten()]))
        self.score = torch.cat((self.score, score[rows] + values.flatten()))
        self.kept = self._best()
        return rows

    def _best(self) -> torch.Tensor:
        """Returns a mask of the `budget` best nodes per request; parents win ties with children."""
        order = torch.argsort(self.score, descending=True, stable=True)
        order = order[torch.argsort(self.request[order], stable=True)]
        counts = torch.bincount(self.request, minlength=self.num_requests)
        starts = counts.cumsum(0) - counts
        rank = torch.arange(len(order)) - starts[self.request[order]]
        kept = torch.zeros(len(order), dtype=torch.bool)
        kept[order[rank < self.budget]] = True
        return kept

    def matched(self, truth: torch.Tensor) -> torch.Tensor:
        """Returns the length int64 [R] of each request's path that follows `truth` [R, D]."""
        on_path = self.kept & (self.token == truth[self.request, self.depth - 1])
        # Nodes of a depth come after all nodes of the previous one, so one pass per depth suffices.
        for depth in range(2, int(self.depth.max()) + 1 if len(self.depth) else 1):
            here = self.depth == depth
            on_path[here] &= on_path[self.parent[here]]
        accepted = torch.zeros(self.num_requests, dtype=torch.int64)
        return accepted.index_add_(0, self.request[on_path], torch.ones(int(on_path.sum())).long())
