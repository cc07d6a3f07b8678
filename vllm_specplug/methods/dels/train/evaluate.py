# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of a block head fused with a local head (DeLS), as chains and as trees.

At depth i the backbone's logits l and the local head's scores s of the tokens drafted before it are
fused to l + alpha * s - beta * log p_unigram (DeLS-Spec, the product of experts with the prior that
both share taken out once).
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
    """A local head beside the draft vocabulary it is fused on.

    `table` [V', r] are the rows of its output, `log_prior` float32 [V'] the unigram prior. With
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
        """Picks the rows of the draft vocabulary; `log_prior` is [V], `local_ids` the target ids
        of a local head that scores a part of the vocabulary, `dtype` that of the scores' product.

        Raises ValueError where the local head does not score a token of the draft vocabulary.
        """
        table = head.output_table(draft.lm_head)
        if head.config.lm_head_mode == "low_rank":
            rows = torch.arange(head.config.draft_vocab_size) if local_ids is None else local_ids
            where = torch.full((head.config.vocab_size,), -1, dtype=torch.int64)
            where[rows] = torch.arange(len(rows))
            picked = where[draft.target_ids]
            if bool((picked < 0).any()):
                raise ValueError(
                    f"the local head scores {len(rows)} tokens, but not "
                    f"{int((picked < 0).sum())} of the {len(picked)} the draft head drafts; use a "
                    "local head trained for that draft head or for the whole vocabulary"
                )
            table = table[picked]
        feed = head.config.anchor_input if anchor_input is None else anchor_input
        return cls(head, draft, table.to(dtype), log_prior[draft.target_ids], feed)

    def step(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads target ids [F] after states [F, S]: rank vectors [F, r] and new states."""
        return self.head.step(tokens, state, self.draft.embed_tokens)

    def scores(self, ranks: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Scores [..., M] of draft ids [..., M] after rank vectors [..., r]."""
        # One product with the whole table is cheaper than gathering M rows of it for each vector.
        return (ranks.to(self.table.dtype) @ self.table.t()).gather(-1, rows).float()

    def prefix_ranks(self, rounds: Rounds) -> torch.Tensor:
        """Rank vectors [R, D, r] for each depth if all earlier drafts were right; zero where the
        head has read nothing (depth 1 without the anchor)."""
        truth = rounds.truth.clamp_min(0)
        if self.anchor_input:
            tokens = torch.cat((rounds.anchors[:, None], truth[:, :-1]), -1)
            return self.head.ranks(tokens, self.draft.embed_tokens)[0]
        read = self.head.ranks(truth[:, :-1], self.draft.embed_tokens)[0]
        return torch.cat((torch.zeros_like(read[:, :1]), read), 1)


@dataclass(frozen=True)
class Fusion:
    """Weights of the fusion, float32 [D] each, entry i - 1 for depth i."""

    alpha: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def of(
        cls, tables: LocalTables, depth: int, alpha: float | Sequence[float], beta: float | Sequence
    ) -> Fusion:
        """Scalars or lists as a user gives them: one value for all depths, or one for each depth
        that the local head corrects (all, without the anchor all but the first)."""
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
    """What decides a DeLS chain at every anchor of a sequence, before alpha and beta.

    `logits` of the backbone, `scores` of the local head and `log_prior`, each [A, D, M] over the
    tokens that compete at a slot; `is_truth` bool [A, D, M] marks the true one.
    """

    logits: torch.Tensor
    scores: torch.Tensor
    log_prior: torch.Tensor
    is_truth: torch.Tensor

    def accepted(self, fusion: Fusion) -> torch.Tensor:
        """Drafts accepted at each anchor, int64 [A].

        A chain stops at its first wrong draft, so scores given the true prefix decide it.
        """
        fused = self.logits + fusion.alpha[:, None] * self.scores
        fused -= fusion.beta[:, None] * self.log_prior
        best = fused.argmax(-1, keepdim=True)
        return self.is_truth.gather(-1, best).squeeze(-1).long().cumprod(-1).sum(-1)


@torch.no_grad()
def chain_scores(tables: LocalTables, sequence: DraftedSequence) -> ChainScores:
    """`ChainScores` at every anchor of a sequence."""
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
    """The best tree of `budget` nodes under the fused distributions, each branch with its own
    local state (see `FusedTrees`)."""

    def accepted(rounds: Rounds) -> torch.Tensor:
        return FusedTrees(tables, fusion, rounds, budget, width).matched(rounds.truth)

    return torch.no_grad()(accepted)


class FusedTrees:
    """Trees of R requests grown depth by depth, together.

    All nodes scored so far compete to be among the `budget` best of their request. The next depth
    grows only from kept nodes of the last one. Scores fall along a path, so no node
    outside can have a descendant inside: the tree is exactly the best one.

    Nodes are rows of parallel tensors: request, parent row (-1: the root), depth, target token,
    score. `kept` marks those of the final trees.

    Only the tokens of a slot compete at it; they share the mass the backbone gives them together,
    as in serving.

    Args:
        width: most children of a node.
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
        # frontier: request, node row, score, local state, token read last
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
        """Adds the children of the frontier; returns each new node's row of the frontier."""
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
        """Marks the `budget` best nodes of each request; parents win ties against children."""
        order = torch.argsort(self.score, descending=True, stable=True)
        order = order[torch.argsort(self.request[order], stable=True)]
        counts = torch.bincount(self.request, minlength=self.num_requests)
        starts = counts.cumsum(0) - counts
        rank = torch.arange(len(order)) - starts[self.request[order]]
        kept = torch.zeros(len(order), dtype=torch.bool)
        kept[order[rank < self.budget]] = True
        return kept

    def matched(self, truth: torch.Tensor) -> torch.Tensor:
        """Length of each request's path that follows `truth` [R, D], int64 [R]."""
        on_path = self.kept & (self.token == truth[self.request, self.depth - 1])
        # Nodes of a depth come after all of the depth before, so one pass settles each depth.
        for depth in range(2, int(self.depth.max()) + 1 if len(self.depth) else 1):
            here = self.depth == depth
            on_path[here] &= on_path[self.parent[here]]
        accepted = torch.zeros(self.num_requests, dtype=torch.int64)
        return accepted.index_add_(0, self.request[on_path], torch.ones(int(on_path.sum())).long())
