# SPDX-License-Identifier: Apache-2.0
"""The acceptance estimate counts what a server would accept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_specplug.train import evaluate
from vllm_specplug.train.evaluate import evaluate_head, matched_nodes
from vllm_specplug.train.features import FeatureSequence

PROMPT = 3


class FakeHead:
    """Only the shape; candidates are injected."""

    training = False

    class config:
        block_size = 4
        num_draft_tokens = 3

    def eval(self):
        return self

    def train(self, mode=True):
        return self


def sequence(answer: list[int], source: str = "a") -> FeatureSequence:
    tokens = torch.tensor([1] * PROMPT + answer)
    return FeatureSequence(tokens, PROMPT, torch.zeros(0), torch.zeros(0), source)


def candidates_for(tokens: np.ndarray, rank: dict[tuple[int, int], int], width: int = 4):
    """At each anchor and slot the true token has the given rank (default: not among them)."""
    anchors = range(PROMPT, len(tokens) - 1)
    ids = np.zeros((len(anchors), 3, width), np.int64)
    logp = np.log(np.array([0.5, 0.2, 0.1, 0.05], np.float32))
    for row, anchor in enumerate(anchors):
        for slot in range(1, 4):
            ids[row, slot - 1] = 100 + np.arange(width) + 10 * slot
            position = anchor + slot
            if (anchor, slot) in rank and position < len(tokens):
                ids[row, slot - 1, rank[anchor, slot]] = tokens[position]
    return ids, np.broadcast_to(logp, ids.shape)


def run(monkeypatch, answer, rank, **options):
    example = sequence(answer)
    monkeypatch.setattr(
        evaluate,
        "draft_candidates",
        lambda *a, **k: candidates_for(example.tokens.numpy(), rank),
    )
    return evaluate_head(FakeHead(), [example], None, None, None, **options)


def test_walk_jumps_over_accepted_tokens(monkeypatch):
    # anchors 3..8; at 3 two drafts are right, so the walk goes on at 6, where none is, then 7.
    rank = {(3, 1): 0, (3, 2): 0, (4, 1): 0, (5, 1): 0, (7, 1): 0}
    report = run(monkeypatch, [11, 12, 13, 14, 15, 16, 17], rank, budgets=(3,))
    chain = report.total["chain"]
    # rounds at 3 (accepts 2), 6 (0), 7 (1)
    assert (chain.rounds, chain.accepted) == (3, 3)
    assert chain.mean_acceptance_length == 2.0
    assert report.by_source["a"]["chain"].rounds == 3


def test_trees_accept_lower_ranks_when_the_budget_allows(monkeypatch):
    rank = {(3, 1): 1, (3, 2): 0, (3, 3): 0}
    report = run(monkeypatch, [11, 12, 13, 14], rank, budgets=(1, 4, 32))
    lengths = report.lengths()
    # 1 node: only rank 0. 4 nodes: (0.5), (0.25), (0.2: the rank-1 child), (0.125).
    assert lengths["chain"] == lengths["best_first/1"] == 1.0
    assert report.total["best_first/4"].accepted == 1
    assert (report.total["best_first/32"].rounds, report.total["best_first/32"].accepted) == (1, 3)


def test_slot_accuracy_counts_rank_one_over_all_anchors(monkeypatch):
    rank = {(3, 1): 0, (4, 1): 0, (5, 1): 2, (3, 2): 0}
    report = run(monkeypatch, [11, 12, 13, 14], rank, budgets=(1,))
    assert report.slot_accuracy() == pytest.approx([2 / 3, 1 / 2, 0.0])


def test_smaller_best_first_trees_are_prefixes(monkeypatch):
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = np.stack([rng.permutation(50)[:6] for _ in range(4)])
        logp = np.sort(np.log(rng.dirichlet(np.ones(8), 4)[:, :6]), 1)[:, ::-1].astype(np.float32)
        truth = [int(rng.choice(row)) for row in ids]
        large = matched_nodes(ids, logp, truth, 32)
        for budget in (1, 4, 8, 16):
            assert matched_nodes(ids, logp, truth, budget) == [n for n in large if n < budget]


def test_builders_other_than_best_first_are_evaluated(monkeypatch):
    rank = {(3, 1): 0, (3, 2): 0}
    report = run(
        monkeypatch, [11, 12, 13], rank, budgets=(2, 8), builders=("best_first", "accum_logp")
    )
    assert set(report.lengths()) == {
        "chain",
        "best_first/2",
        "best_first/8",
        "accum_logp/2",
        "accum_logp/8",
    }
    assert report.total["accum_logp/8"].accepted == 2
    assert report.total["accum_logp/2"].accepted == 1  # siblings come before depth


def test_nothing_drafted_is_length_one():
    assert evaluate.Acceptance().mean_acceptance_length == 1.0
