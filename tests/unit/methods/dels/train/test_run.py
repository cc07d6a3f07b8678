# SPDX-License-Identifier: Apache-2.0
"""Local heads learn from text, start as a no-op, resume bit for bit, and are exported loadable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.block.train.run import RunOptions, train_block_head
from vllm_specplug.methods.block.train.trainer import TrainOptions
from vllm_specplug.methods.dels.checkpoint import load_local_head
from vllm_specplug.methods.dels.train.batch import local_anchors, pack_local
from vllm_specplug.methods.dels.train.run import LocalRunOptions, local_config, train_local_head
from vllm_specplug.methods.dels.train.trainer import LocalOptions, LocalTrainer
from vllm_specplug.methods.local.head import LocalHead
from vllm_specplug.train.target import TargetWeights
from vllm_specplug.train.text import TextSequence, TextStore

OPTIONS = LocalOptions(
    total_steps=12, warmup_steps=0, anchors_per_step=24, anchors_per_sample=8, learning_rate=0.02
)
SHAPES = {
    "gru": {"hidden_size": 12, "rank": 8},
    "markov": {"kind": "markov", "rank": 8},
    "direct": {
        "hidden_size": 12,
        "rank": 8,
        "input_size": 10,
        "parameterization": "direct_vocab",
        "lm_head_mode": "low_rank",
    },
}


@pytest.fixture(scope="module")
def backbone(target_folder, feature_folders, tmp_path_factory) -> str:
    train, held = feature_folders
    out = tmp_path_factory.mktemp("backbone")
    run = RunOptions(
        target=str(target_folder),
        features=str(train),
        heldout=str(held),
        out=str(out),
        causal=False,
        block_size=4,
        draft_vocab_size=48,
    )
    train_block_head(run, TrainOptions(total_steps=3, anchors_per_step=16), lambda text: None)
    return f"{out}/head"


@pytest.fixture
def run(target_folder, feature_folders, tmp_path) -> LocalRunOptions:
    train, held = feature_folders
    return LocalRunOptions(
        target=str(target_folder),
        data=str(train),
        heldout=str(held),
        out=str(tmp_path / "run"),
        block_size=4,
        min_supervised=2,
        eval_every=1000,
        save_every=1000,
        **SHAPES["gru"],
    )


def train(run, options, log=lambda text: None):
    losses = []
    facts = train_local_head(run, options, log, lambda step, n: losses.append(n["loss"]))
    return losses, facts


def trainer_of(run: LocalRunOptions, options: LocalOptions = OPTIONS) -> LocalTrainer:
    weights = TargetWeights(run.target)
    tables = weights.tables()
    store = TextStore(run.data, run.min_supervised)
    torch.manual_seed(0)
    return LocalTrainer(
        LocalHead(local_config(run, weights.config, 64)),
        store,
        options,
        block_size=run.block_size,
        embed_tokens=tables.embed_tokens,
        lm_head=tables.lm_head,
        target_ids=torch.arange(64),
        counts=store.answer_counts(64),
    )


@pytest.mark.parametrize("shape", list(SHAPES))
def test_training_starts_as_a_no_op_and_learns(run, shape):
    run = replace(run, **{"kind": "gru", **SHAPES[shape]})
    trainer = trainer_of(run, replace(OPTIONS, total_steps=80, learning_rate=0.05))
    tokens = torch.randint(0, 64, (5, 3))
    tables = TargetWeights(run.target).tables()
    scores = trainer.head(tokens, trainer.embed_tokens, tables.lm_head)
    assert torch.equal(scores, torch.zeros_like(scores))
    losses = [trainer.train_step()["loss"] for _ in range(80)]
    # All scores equal: the loss of the first step is that of a uniform guess.
    assert losses[0] == pytest.approx(torch.log(torch.tensor(64.0)).item(), rel=1e-3)
    assert sum(losses[-5:]) < 0.9 * 5 * losses[0]
    assert trainer.head(tokens, trainer.embed_tokens, tables.lm_head).abs().max() > 0.1


@pytest.mark.parametrize(
    "recipe", [{"optimizer": "muon"}, {"optimizer": "adamw", "loss": "forward_kl"}]
)
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(run, tmp_path, recipe):
    options = replace(OPTIONS, **recipe)
    if options.loss != "sft":
        options = replace(options, vocab_per_step=32)
    whole, _ = train(run, options)
    split = replace(run, out=str(tmp_path / "split"), save_every=7)

    def stop(step, _numbers):
        if step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_local_head(split, options, lambda text: None, stop)
    resumed, facts = train(replace(split, resume=True), options)
    assert resumed == whole[7:]
    assert facts["progress"]["step"] == 12
    states = [torch.load(f"{r.out}/state.pt", weights_only=True) for r in (run, split)]
    for part in ("head", "ema"):
        for name, tensor in states[0][part].items():
            assert torch.equal(tensor, states[1][part][name]), name
    with pytest.raises(ValueError, match=r"rank_proj\.weight = \(4, 12\), but the checkpoint has"):
        train(replace(split, resume=True, rank=4), options)
    with pytest.raises(ValueError, match="--resume"):
        train(split, options)


@pytest.mark.parametrize("shape", ["gru", "direct"])
def test_run_with_a_backbone_leaves_a_loadable_head(run, backbone, target_folder, shape):
    run = replace(run, backbone=backbone, block_size=0, **SHAPES[shape])
    lines = []
    _, facts = train(run, OPTIONS, lines.append)
    config = json.loads((target_folder / "config.json").read_text())
    head, ids = load_local_head(f"{run.out}/head", config)
    assert head.config.hidden_size == 12
    block, extras = load_block_head(backbone, config)
    if shape == "direct":
        assert torch.equal(ids, extras.target_ids(48))
    else:
        assert ids is None  # the target's LM head scores every token
    record = json.loads(Path(run.out, "head", "provenance.json").read_text())
    assert record["shape"]["block_size"] == block.config.block_size == 4
    assert record["backbone"]["name"] == "head"
    assert record["data"]["answer_tokens"] == 12 * 24
    assert record["heldout"] == facts["heldout"]
    lengths = record["heldout"]["mean_acceptance_length"]
    assert set(lengths) == {"backbone", "dels", "dels, anchor fed"}
    assert all(1.0 <= value <= 4.0 for value in lengths.values())
    assert len(record["heldout"]["cross_entropy_by_tokens_read"]) == 3
    assert any("held-out" in line for line in lines)


def text(prompt: list[int], answer: list[int]) -> TextSequence:
    tokens = torch.tensor(prompt + answer)
    return TextSequence(tokens, len(prompt), "x", torch.arange(len(tokens)).float()[:, None])


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
    weights = batch.weights(2.0).view(3, 3)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert not weights[~batch.valid].any()
    assert float(weights[0, 1] / weights[0, 0]) == pytest.approx(
        torch.exp(torch.tensor(-0.5)).item()
    )


def test_anchors_of_a_sample_are_limited_and_random():
    sequence = text([1], list(range(50)))
    chosen = [
        local_anchors(sequence, 8, torch.Generator().manual_seed(seed)).tolist() for seed in (0, 1)
    ]
    for anchors in chosen:
        assert len(set(anchors)) == 8 and anchors == sorted(anchors)
        assert anchors[0] >= 1 and anchors[-1] <= 49
    assert chosen[0] != chosen[1]


def test_a_markov_head_sees_every_pair_once(run):
    trainer = trainer_of(replace(run, **SHAPES["markov"]), replace(OPTIONS, anchors_per_step=30))
    batch = trainer.next_batch()
    # Whole answers of 24 tokens: 23 pairs each.
    assert batch.tokens.shape == (46, 1)
    assert batch.valid.all()


def test_a_step_trains_the_frequent_tokens_and_some_others(run):
    options = replace(OPTIONS, loss="forward_kl", vocab_per_step=20)
    trainer = trainer_of(run, options)
    first = trainer.step_vocabulary()
    assert len(set(first.tolist())) == 20
    counts = trainer.store.answer_counts(64)
    assert counts[first[:10]].min() >= counts.sort(descending=True).values[9]
    trainer.step += 1
    second = trainer.step_vocabulary()
    assert torch.equal(first[:10], second[:10]) and not torch.equal(first, second)
    assert trainer_of(run, replace(options, vocab_per_step=64)).step_vocabulary() is None


@pytest.mark.parametrize(
    ("run_change", "change", "words"),
    [
        ({"kind": "lstm"}, {}, "kind = 'lstm', legal: gru, markov"),
        ({"block_size": 1}, {}, "block_size = 1, legal: an integer >= 2"),
        ({"rank": 0}, {}, "rank = 0, legal: an integer from 1 to"),
        ({"data": "/nowhere"}, {}, "neither answers nor features"),
        ({"min_supervised": 1000}, {}, "no answer of 1000 tokens"),
        ({}, {"vocab_per_step": 8}, "vocab_per_step = 8, legal with loss sft: 0"),
    ],
)
def test_bad_runs_are_refused_with_the_remedy(run, run_change, change, words):
    with pytest.raises(ValueError, match=words):
        train(replace(run, **run_change), replace(OPTIONS, **change))


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss", "kl"), ("anchors_per_sample", 0), ("position_gamma", -1.0), ("temperature", 0.0)],
)
def test_bad_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} = .*legal"):
        LocalOptions(**{name: value})
