# SPDX-License-Identifier: Apache-2.0
"""Local heads start as a no-op, learn from answers only, and are measured beside a backbone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.dels.checkpoint import load_local_head
from vllm_specplug.methods.dels.train.batch import local_anchors, pack_local
from vllm_specplug.methods.dels.unigram import UNIGRAM_NAME, load_unigram
from vllm_specplug.train.features import FeatureSequence, FeatureStore
from vllm_specplug.train.vocabulary import answer_token_counts


def test_run_with_a_backbone_leaves_a_loadable_head(make_job, target_folder):
    backbone = make_job("dflash", "backbone", total_steps=3)
    backbone.train()
    job = make_job("gru", backbone=str(backbone.head), block_size=0)
    _, facts = job.train()
    config = json.loads((target_folder / "config.json").read_text())
    head, ids = load_local_head(job.head, config)
    assert head.config.hidden_size == 12
    block, _ = load_block_head(backbone.head, config)
    assert ids is None  # the target's LM head scores every token
    assert facts["shape"]["block_size"] == block.config.block_size == 4
    assert facts["backbone"]["name"] == "head"
    assert len(facts["heldout"]["slot_accuracy"]) == 3
    counts = load_unigram(job.head / UNIGRAM_NAME)
    store = FeatureStore(job.run.features)
    answers = torch.cat([torch.as_tensor(answer.copy()) for answer in store.answers()])
    assert torch.equal(counts, answers.bincount(minlength=config["vocab_size"]))


def text(prompt: list[int], answer: list[int]) -> FeatureSequence:
    tokens = torch.tensor(prompt + answer)
    states = torch.arange(len(tokens)).float()[:, None]
    return FeatureSequence(tokens, len(prompt), states, states)


def test_only_answers_are_supervised_and_read():
    sequence = text([1, 2, 3], [10, 11, 12, 13])
    generator = torch.Generator().manual_seed(0)
    anchors = local_anchors(sequence, 100, generator)
    # The anchor and the token after it are the answer's.
    assert anchors.tolist() == [3, 4, 5]
    batch = pack_local([sequence], [anchors], 4)
    assert batch.tokens.tolist() == [[10, 11, 12], [11, 12, 13], [12, 13, 13]]
    assert batch.valid.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert batch.labels[batch.valid].tolist() == [11, 12, 13, 12, 13, 13]
    # The teacher of a label is the state before it.
    states = batch.teacher.view(3, 3)[batch.valid].tolist()
    assert states == [3.0, 4.0, 5.0, 4.0, 5.0, 5.0]


def test_anchors_of_a_sample_are_limited_and_random():
    sequence = text([1], list(range(50)))
    chosen = [
        local_anchors(sequence, 8, torch.Generator().manual_seed(seed)).tolist() for seed in (0, 1)
    ]
    for anchors in chosen:
        assert len(set(anchors)) == 8 and anchors == sorted(anchors)
        assert anchors[0] >= 1 and anchors[-1] <= 49
    assert chosen[0] != chosen[1]


def test_a_markov_head_sees_every_pair_once(make_job):
    trainer = make_job("markov", anchors_per_step=30).trainer()
    batch = trainer.objective.draw(trainer)
    # Whole answers of 24 tokens: 23 pairs each.
    assert batch.tokens.shape == (46, 1)
    assert batch.valid.all()


def test_a_step_trains_the_frequent_tokens_and_some_others(make_job):
    trainer = make_job("gru by KL", vocab_per_step=20).trainer()
    first, second = (trainer.objective.step_vocabulary(step) for step in (0, 1))
    assert len(set(first.tolist())) == 20
    counts = answer_token_counts(trainer.store, 64)
    assert counts[first[:10]].min() >= counts.sort(descending=True).values[9]
    assert torch.equal(first[:10], second[:10]) and not torch.equal(first, second)
    every = make_job("gru by KL", vocab_per_step=64).trainer()
    assert every.objective.step_vocabulary(0) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "lstm"}, "kind = 'lstm', legal: one of"),
        ({"kind": "gated"}, "kind = 'gated', legal: one of"),
        ({"block_size": 1}, "block_size = 1, legal: an integer >= 2"),
        ({"rank": 0}, "rank = 0, legal: an integer from 1 to"),
        ({"vocab_per_step": 8}, "--vocab-per-step 8, legal with loss sft: 0"),
        (
            {"features": None, "heldout": None, "answers": Path("answers"), "layers": "1,3"},
            "--layers 1,3, legal: only for a head that reads several layers",
        ),
    ],
)
def test_bad_runs_are_refused_with_the_remedy(make_job, change, words):
    with pytest.raises(ValueError, match=words):
        make_job("gru").changed(**change).train()
