# SPDX-License-Identifier: Apache-2.0
"""The estimate from held-out answers counts what a server would accept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.unit.train.heads import Job
from vllm_specplug.train.features import TokenSequence
from vllm_specplug.train.heldout import ChainAcceptance
from vllm_specplug.train.trainer import Objective
from vllm_specplug.train.vocabulary import DraftTables

PROMPT = 3


def test_a_walk_jumps_over_accepted_tokens() -> None:
    answer = [11, 12, 13, 14, 15, 16, 17]
    tokens = torch.tensor([1] * PROMPT + answer)
    drafts = torch.full((6, 3), 99)
    # Anchors 11 to 16. After 11 two drafts are right, after 14 none, after 15 one.
    for row, slot in ((0, 0), (0, 1), (1, 0), (2, 0), (4, 0)):
        drafts[row, slot] = answer[row + 1 + slot]
    found = ChainAcceptance()
    found.add(drafts, tokens, PROMPT, "a")
    assert found.rounds == {"a": Counter({2: 1, 0: 1, 1: 1})}
    facts = found.facts()
    assert facts["mean_acceptance_length"] == {"chain": 2.0}
    assert facts["rounds_reaching_depth"] == {"chain": [0.667, 0.333]}
    # Over all anchors: four of six first drafts, one of five second ones, none of four third ones.
    assert facts["slot_accuracy"] == [0.667, 0.2, 0.0]
    assert found.summary() == (
        "mean acceptance length of chains 2.000; slot accuracy 0.67 0.20 0.00"
    )
    found.add(drafts[:1], tokens[:6], PROMPT, "b")
    assert found.facts()["mean_acceptance_length"] == {"chain": 2.25}
    assert found.facts()["mean_acceptance_length_by_source"] == {
        "a": {"chain": 2.0}, "b": {"chain": 3.0},
    }  # fmt: skip


class Successor(Objective):
    """Drafts the next numbers, which a table of few tokens names by their places."""

    draw = forward = loss = None

    def drafts(self, head, sequence, anchors, tables):
        steps = sequence.tokens[anchors][:, None] + torch.arange(1, 4)
        return (steps - int(tables.target_ids[0])).clamp_max(len(tables.target_ids) - 1)


def test_a_head_that_knows_the_answer_is_accepted_to_the_full_depth(monkeypatch) -> None:
    monkeypatch.setattr(Successor, "anchors_per_batch", 2)
    tables = DraftTables(torch.zeros(60, 2), torch.zeros(50, 2), torch.arange(10, 60))
    texts = [TokenSequence(torch.arange(20, 20 + n), 2, "x") for n in (2, 11)]
    found = Successor().measure(None, texts, tables)
    # Nine tokens after the prompt are an anchor, three drafts and a token of the target twice.
    assert found.rounds == {"x": Counter({3: 2})}


@pytest.mark.parametrize(
    "kind", ["jetspec", "dflash", "dspark", "eagle3", "longspec", "tokenswift", "gru", "markov"]
)
def test_a_draft_reads_only_what_precedes_it(kind: str, make_job: Callable[..., Job]) -> None:
    made = make_job(kind).trainer()
    store, head, tables = made.store, made.head, made.tables
    with torch.no_grad():
        for parameter in head.parameters():  # no part starts as a no-op
            parameter.add_(0.1 * torch.randn_like(parameter))
    sequence, at = store[2], 12
    states = [name for name in ("aux", "hidden", "key", "value") if hasattr(sequence, name)]
    changed = {"tokens": torch.cat((sequence.tokens[:at], (sequence.tokens[at:] + 7) % 64))}
    for name in states:
        state = getattr(sequence, name)
        changed[name] = torch.cat((state[:at], torch.randn_like(state[at:])))
    anchors = torch.arange(4, len(sequence.tokens) - 1)
    with torch.no_grad(), tables.autocast():
        one, other = (
            made.objective.drafts(head, s, anchors, tables)
            for s in (sequence, replace(sequence, **changed))
        )
    # The draft of slot d after anchor a reads the tokens up to a + d.
    read = anchors[:, None] + torch.arange(one.shape[1])
    assert one.shape == other.shape == read.shape
    assert torch.equal(one[read < at], other[read < at])
    assert not torch.equal(one[anchors >= at], other[anchors >= at])


def test_a_markov_head_takes_part_in_the_drafts(make_job: Callable[..., Job]) -> None:
    made = make_job("dspark").trainer()
    sequence, markov = made.store[0], made.head.markov_head
    token, always = int(sequence.tokens[10]), 5
    with torch.no_grad():
        markov.markov_w1.weight.zero_()
        markov.markov_w1.weight[token] = 1.0
        markov.markov_w2.weight[always] = 1000.0
    with torch.no_grad(), made.tables.autocast():
        drafts = made.objective.drafts(made.head, sequence, torch.arange(8, 14), made.tables)
    after = sequence.tokens[8 : 14 + drafts.shape[1]].unfold(0, drafts.shape[1], 1)[:6] == token
    assert after.sum() >= 3
    assert (drafts[after] == always).all() and not (drafts == always).all()
