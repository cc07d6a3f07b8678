# SPDX-License-Identifier: Apache-2.0
"""DeLS estimates against walks that draft and compare one token at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from vllm_specplug.methods.block.train.evaluate import chain_policy, tree_policy
from vllm_specplug.methods.dels.train.evaluate import (
    FusedTrees,
    Fusion,
    LocalTables,
    evaluate_local_chains,
    local_tree_policy,
)
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import AcceptanceReport, DraftedSequence, Slots, rounds_at, walk

VOCAB, DRAFT, HIDDEN, DEPTH, PROMPT = 12, 9, 6, 4, 2


@pytest.fixture(params=["gru", "markov"])
def local(request) -> LocalHead:
    torch.manual_seed(1)
    sizes = {"hidden_size": 5} if request.param == "gru" else {}
    config = LocalHeadConfig(
        kind=request.param,
        vocab_size=VOCAB,
        target_hidden_size=HIDDEN,
        rank=3,
        lm_head_mode="target_lm_head",
        **sizes,
    )
    head = LocalHead(config)
    torch.nn.init.normal_(head.rank_to_hidden.weight, std=2.0)
    return head.requires_grad_(False)


def draft_tables() -> DraftTables:
    generator = torch.Generator().manual_seed(2)
    ids = torch.tensor([0, 1, 2, 3, 5, 6, 8, 9, 11])
    assert len(ids) == DRAFT
    return DraftTables(
        torch.randn(VOCAB, HIDDEN, generator=generator),
        torch.randn(DRAFT, HIDDEN, generator=generator),
        ids,
    )


def logits_of(slots: Slots) -> torch.Tensor:
    """[D, V'] of one block whose slots hold the whole vocabulary."""
    return torch.zeros(DEPTH, DRAFT).scatter(-1, slots.rows, slots.logits)


def build(local: LocalHead, anchor_input: bool = False) -> LocalTables:
    generator = torch.Generator().manual_seed(3)
    prior = torch.log_softmax(torch.randn(VOCAB, generator=generator), -1)
    return LocalTables.build(local, draft_tables(), prior, anchor_input=anchor_input)


def sequences(count: int = 3, candidates: int = 0) -> list[DraftedSequence]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for index in range(count):
        length = 9 + index
        tokens = torch.randint(0, VOCAB, (PROMPT + length,), generator=generator)
        hidden = torch.randn(length - 1, DEPTH, HIDDEN, generator=generator)
        slots = draft_tables().slots(hidden, candidates)
        made.append(DraftedSequence(tokens, PROMPT, slots, f"s{index % 2}"))
    return made


def branch_log_probs(
    tables: LocalTables, fusion: Fusion, logits: torch.Tensor, anchor: int, branch: list[int]
) -> torch.Tensor:
    """Fused log-probabilities [V'] after the drafted `branch`, from first principles."""
    depth = len(branch)
    fused = logits[depth].clone()
    read = ([anchor] if tables.anchor_input else []) + branch
    if read:
        scores = tables.head(torch.tensor([read]), tables.draft.embed_tokens, tables.draft.lm_head)[
            0, -1
        ]
        fused += fusion.alpha[depth] * scores - fusion.beta[depth] * tables.log_prior
    return torch.log_softmax(fused, -1)


@pytest.mark.parametrize("anchor_input", [False, True])
def test_chain_estimate_equals_a_walk_token_by_token(local, anchor_input):
    tables = build(local, anchor_input)
    fusion = Fusion.of(tables, DEPTH, 0.7, 0.4)
    report = AcceptanceReport()
    evaluate_local_chains(tables, sequences(), {"dels": fusion}, report)
    rounds = accepted = 0
    for sequence in sequences():
        tokens, at = sequence.tokens.tolist(), 0
        while at < sequence.num_anchors:
            logits = logits_of(sequence.slots[at])
            anchor, branch = tokens[PROMPT + at], []
            for _ in range(DEPTH):
                best = branch_log_probs(tables, fusion, logits, anchor, branch).argmax()
                branch.append(int(tables.draft.target_ids[best]))
            true = tokens[PROMPT + at + 1 :][:DEPTH]
            count = len(
                list(itertools.takewhile(lambda p: p[0] == p[1], zip(branch, true, strict=False)))
            )
            rounds, accepted, at = rounds + 1, accepted + count, at + count + 1
    assert (report.total["dels"].rounds, report.total["dels"].accepted) == (rounds, accepted)
    assert accepted > 0


@pytest.mark.parametrize("anchor_input", [False, True])
def test_trees_hold_the_best_paths_of_all(local, anchor_input):
    """Against every path of the vocabulary, enumerated."""
    tables = build(local, anchor_input)
    fusion = Fusion.of(tables, DEPTH, 0.7, 0.4)
    sequence = sequences(1)[0]
    rounds = rounds_at(sequence, torch.arange(3))
    trees = FusedTrees(tables, fusion, rounds, budget=7, width=DRAFT)
    for request in range(3):
        logits = logits_of(rounds.slots[request])
        anchor = int(rounds.anchors[request])
        scored: dict[tuple[int, ...], float] = {(): 0.0}
        for depth in range(DEPTH):
            for branch in [b for b in scored if len(b) == depth]:
                log_probs = branch_log_probs(tables, fusion, logits, anchor, list(branch))
                for token, value in zip(tables.draft.target_ids.tolist(), log_probs, strict=True):
                    scored[(*branch, token)] = scored[branch] + float(value)
        best = sorted(scored, key=lambda b: -scored[b])[1:8]
        rows = torch.nonzero(trees.kept & (trees.request == request)).flatten().tolist()
        found = set()
        for row in rows:
            path, at = [], row
            while at >= 0:
                path.append(int(trees.token[at]))
                at = int(trees.parent[at])
            found.add(tuple(reversed(path)))
            assert float(trees.score[row]) == pytest.approx(scored[tuple(reversed(path))], abs=1e-4)
        assert found == set(best)


def test_matched_counts_the_true_path_inside_the_tree(local):
    tables = build(local)
    fusion = Fusion.of(tables, DEPTH, 0.7, 0.4)
    sequence = sequences(1)[0]
    rounds = rounds_at(sequence, torch.arange(sequence.num_anchors))
    trees = FusedTrees(tables, fusion, rounds, budget=24, width=DRAFT)
    truth = rounds.truth.clone()
    for request in range(4):  # paths that the trees do hold, as deep as they go
        rows = torch.nonzero(trees.kept & (trees.request == request)).flatten()
        at = int(rows[trees.depth[rows].argmax()])
        while at >= 0:
            truth[request, trees.depth[at] - 1] = trees.token[at]
            at = int(trees.parent[at])
    accepted = trees.matched(truth).tolist()
    assert max(accepted) >= 2 and min(accepted) == 0
    for request, row in enumerate(truth.tolist()):
        at, count = -1, 0
        for token in row:
            children = trees.kept & (trees.request == request) & (trees.parent == at)
            hits = torch.nonzero(children & (trees.token == token)).flatten().tolist()
            if not hits:
                break
            at, count = hits[0], count + 1
        assert accepted[request] == count


def test_no_weight_is_the_backbone_exactly(local):
    tables = build(local)
    none = Fusion.of(tables, DEPTH, 0.0, 0.0)
    backbone, fused = AcceptanceReport(), AcceptanceReport()
    walk(sequences(), "chain", chain_policy(tables.draft), backbone)
    evaluate_local_chains(tables, sequences(), {"chain": none}, fused)
    walk(sequences(), "tree", tree_policy(tables.draft, 6, 4), backbone)
    walk(sequences(), "tree", local_tree_policy(tables, none, 6, 4), fused)
    for name in ("chain", "tree"):
        assert backbone.total[name] == fused.total[name]
        assert backbone.total[name].accepted > 0


def test_a_tree_one_wide_is_the_chain(local):
    tables = build(local)
    fusion = Fusion.of(tables, DEPTH, 0.9, 0.2)
    report = AcceptanceReport()
    evaluate_local_chains(tables, sequences(), {"chain": fusion}, report)
    walk(sequences(), "tree", local_tree_policy(tables, fusion, DEPTH, 1), report)
    assert report.total["chain"] == report.total["tree"]


def test_candidates_limit_what_competes_and_keep_the_mass(local):
    tables = build(local)
    narrow, whole = (rounds_at(sequences(1, m)[0], torch.arange(2)) for m in (4, 0))
    none = Fusion.of(tables, DEPTH, 0.0, 0.0)
    # Weights of 0 give the backbone's own scores, whatever the number of candidates.
    few, all_ = (FusedTrees(tables, none, rounds, 5, 3) for rounds in (narrow, whole))
    for name in ("token", "parent", "request"):
        assert torch.equal(getattr(few, name)[few.kept], getattr(all_, name)[all_.kept])
    assert torch.allclose(few.score[few.kept], all_.score[all_.kept], atol=1e-5)
    fusion = Fusion.of(tables, DEPTH, 3.0, 1.0)
    one_wide, chain = AcceptanceReport(), AcceptanceReport()
    walk(sequences(3, 3), "x", local_tree_policy(tables, fusion, DEPTH, 1), one_wide)
    evaluate_local_chains(tables, sequences(3, 3), {"x": fusion}, chain)
    assert one_wide.total == chain.total
    rounds = rounds_at(sequences(1, 2)[0], torch.arange(2))
    few = FusedTrees(tables, fusion, rounds, 8, 8)
    best = tables.draft.target_ids[whole.slots.rows[..., :2]]
    for row in torch.nonzero(few.kept).flatten().tolist():
        allowed = best[few.request[row], few.depth[row] - 1]
        assert few.token[row] in allowed


def test_a_reduced_local_vocabulary_must_cover_the_drafts(local):
    torch.manual_seed(0)
    config = LocalHeadConfig(
        kind="markov", vocab_size=VOCAB, target_hidden_size=HIDDEN, rank=3, draft_vocab_size=10
    )
    head = LocalHead(config).requires_grad_(False)
    torch.nn.init.normal_(head.low_rank_lm_head.weight)
    draft = build(local).draft
    ids = torch.tensor([11, 9, 8, 6, 5, 3, 2, 1, 0, 4])
    tables = LocalTables.build(head, draft, torch.zeros(VOCAB), ids)
    assert torch.equal(tables.table, head.low_rank_lm_head.weight[[8, 7, 6, 5, 4, 3, 2, 1, 0]])
    with pytest.raises(ValueError, match="1 of the 9 that the block head drafts are not"):
        LocalTables.build(
            head, draft, torch.zeros(VOCAB), torch.tensor([11, 9, 8, 6, 5, 3, 2, 1, 4, 7])
        )


def test_weights_are_one_number_or_one_a_corrected_depth(local):
    tables = build(local)
    assert Fusion.of(tables, DEPTH, 0.5, [1, 2, 3]).beta.tolist() == [0, 1, 2, 3]
    assert Fusion.of(tables, DEPTH, 0.5, 0.0).alpha.tolist() == [0, 0.5, 0.5, 0.5]
    fed = build(local, anchor_input=True)
    assert np.allclose(Fusion.of(fed, DEPTH, 0.5, [1, 2, 3, 4]).beta, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="beta has 2 values, legal: 1, or 3"):
        Fusion.of(tables, DEPTH, 0.5, [1, 2])
