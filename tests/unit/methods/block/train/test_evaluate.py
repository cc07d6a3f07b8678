# SPDX-License-Identifier: Apache-2.0
"""The acceptance estimate counts what a server would accept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_specplug.methods.block.train import evaluate
from vllm_specplug.methods.block.train.evaluate import evaluate_head, matched_nodes
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import (
    NO_TOKEN,
    Acceptance,
    AcceptanceReport,
    DraftedSequence,
    Slots,
    walk,
)

PROMPT, DEPTH, VOCAB = 3, 3, 200


def sequence(answer: list[int], source: str = "a") -> FeatureSequence:
    tokens = torch.tensor([1] * PROMPT + answer)
    return FeatureSequence(tokens, PROMPT, torch.zeros(0), torch.zeros(0), source)


def slots_of(logits: np.ndarray, candidates: int = 4) -> Slots:
    """[A, D, V'] as a backbone's slots; the LM head is the identity."""
    size = logits.shape[-1]
    tables = DraftTables(torch.zeros(1, 1), torch.eye(size), torch.arange(size))
    return tables.slots(torch.from_numpy(logits), candidates)


def drafted(example: FeatureSequence, rank: dict[tuple[int, int], int]) -> DraftedSequence:
    """At each anchor and slot the true token has the given rank of four (default: none of them)."""
    tokens = example.tokens.numpy()
    anchors = range(PROMPT, len(tokens) - 1)
    logits = np.full((len(anchors), DEPTH, VOCAB), -30.0, np.float32)
    for row, anchor in enumerate(anchors):
        for slot in range(1, DEPTH + 1):
            ids = 100 + np.arange(4) + 10 * slot
            position = anchor + slot
            if (anchor, slot) in rank and position < len(tokens):
                ids[rank[anchor, slot]] = tokens[position]
            logits[row, slot - 1, ids] = np.log([0.5, 0.2, 0.1, 0.05])
    return DraftedSequence(example.tokens, PROMPT, slots_of(logits), example.source)


def run(monkeypatch, answer, rank, **options):
    example = sequence(answer)
    monkeypatch.setattr(evaluate, "draft_sequences", lambda *a, **k: [drafted(example, rank)])
    tables = DraftTables(torch.zeros(0), torch.eye(VOCAB), torch.arange(VOCAB))
    return evaluate_head(None, [example], tables, width=4, **options)


def test_walk_jumps_over_accepted_tokens(monkeypatch):
    # anchors 3..8; at 3 two drafts are right, so the walk goes on at 6, where none is, then 7.
    rank = {(3, 1): 0, (3, 2): 0, (4, 1): 0, (5, 1): 0, (7, 1): 0}
    report = run(monkeypatch, [11, 12, 13, 14, 15, 16, 17], rank, budgets=(3,))
    chain = report.total["chain"]
    # rounds at 3 (accepts 2), 6 (0), 7 (1)
    assert (chain.rounds, chain.accepted) == (3, 3)
    assert chain.mean_acceptance_length == 2.0
    assert [chain.share_reaching(d) for d in (1, 2, 3)] == pytest.approx([2 / 3, 1 / 3, 0.0])
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


def test_smaller_best_first_trees_are_prefixes():
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = np.stack([rng.permutation(50)[:6] for _ in range(4)])
        logp = np.sort(np.log(rng.dirichlet(np.ones(8), 4)[:, :6]), 1)[:, ::-1].astype(np.float32)
        truth = [int(rng.choice(row)) for row in ids]
        large = matched_nodes(ids, logp, truth, 32)
        for budget in (1, 4, 8, 16):
            assert matched_nodes(ids, logp, truth, budget) == [n for n in large if n < budget]


def test_nothing_drafted_is_length_one():
    assert Acceptance().mean_acceptance_length == 1.0


def test_lockstep_walk_equals_walking_each_sequence_by_itself():
    """Brute force: one anchor after another, drafts compared token by token."""
    rng = np.random.default_rng(3)
    examples, best = [], {}
    for length in (2, 9, 17, 12):
        answer = rng.integers(1, 6, length).tolist()
        logits = rng.normal(size=(length - 1, DEPTH, 8)).astype(np.float32) * 2
        for row in range(length - 1):
            for slot in range(DEPTH):
                if row + slot + 1 < length and rng.random() < 0.6:
                    logits[row, slot, answer[row + slot + 1]] = 9.0
        tokens = torch.tensor([1] * PROMPT + answer)
        examples.append(DraftedSequence(tokens, PROMPT, slots_of(logits), f"s{length}"))
        best[f"s{length}"] = logits.argmax(-1)
    tables = DraftTables(torch.zeros(8, 1), torch.eye(8), torch.arange(8))
    report = AcceptanceReport()
    walk(examples, "chain", evaluate.chain_policy(tables), report)
    for example in examples:
        tokens, at, expected = example.tokens.tolist(), 0, []
        while at < example.num_anchors:
            drafts, count = best[example.source][at].tolist(), 0
            for draft, true in zip(drafts, tokens[PROMPT + at + 1 :], strict=False):
                if draft != true:
                    break
                count += 1
            expected.append(count)
            at += count + 1
        counts = report.by_source[example.source]["chain"]
        assert (counts.rounds, counts.accepted) == (len(expected), sum(expected))
    assert report.total["chain"].accepted > 5


def test_slots_keep_the_likeliest_tokens_and_the_whole_norm():
    logits = np.random.default_rng(0).normal(size=(2, DEPTH, 9)).astype(np.float32)
    want = torch.log_softmax(torch.from_numpy(logits), -1)
    slots = slots_of(logits, 3)
    assert slots.rows.shape == (2, DEPTH, 3)
    assert torch.allclose(slots.log_probs, want.topk(3).values, atol=1e-6)
    narrow = slots.narrowed(2)
    assert torch.equal(narrow.rows, slots.rows[..., :2])
    assert torch.equal(narrow.log_probs, slots.log_probs[..., :2])
    assert slots_of(logits, 0).rows.shape[-1] == 9


def test_truth_ends_with_the_answer():
    example = drafted(sequence([11, 12, 13]), {})
    assert example.truth(torch.tensor([0, 1])).tolist() == [
        [12, 13, NO_TOKEN],
        [13, NO_TOKEN, NO_TOKEN],
    ]
