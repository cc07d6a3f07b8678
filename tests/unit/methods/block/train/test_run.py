# SPDX-License-Identifier: Apache-2.0
"""The trainer learns, resumes bit for bit, and leaves a loadable head with its provenance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.block.train.run import RunOptions, train_block_head
from vllm_specplug.methods.block.train.trainer import TrainOptions, default_gamma
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.order import DataOrder
from vllm_specplug.train.run import layer_scales
from vllm_specplug.train.vocabulary import draft_vocabulary

OPTIONS = TrainOptions(
    total_steps=12, warmup_steps=2, anchors_per_step=24, anchor_stride=2, learning_rate=5e-3
)


@pytest.fixture
def run(target_folder, feature_folders, tmp_path) -> RunOptions:
    train, held = feature_folders
    return RunOptions(
        target=str(target_folder),
        features=str(train),
        heldout=str(held),
        out=str(tmp_path / "run"),
        causal=True,
        block_size=4,
        draft_vocab_size=48,
        eval_every=1000,
        save_every=1000,
    )


def train(run, options, log=lambda text: None):
    losses = []
    facts = train_block_head(
        run, options, log, lambda step, numbers: losses.append(numbers["loss"])
    )
    return losses, facts


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_loss_falls_on_a_tiny_target(run, optimizer):
    options = replace(OPTIONS, optimizer=optimizer, total_steps=40, adam_learning_rate=5e-3)
    losses, _ = train(run, options)
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(run, tmp_path, optimizer):
    options = replace(OPTIONS, optimizer=optimizer, short_block_size=3, short_block_share=0.5)
    whole, _ = train(run, options)
    split = replace(run, out=str(tmp_path / "split"), save_every=7)
    with pytest.raises(KeyboardInterrupt):
        train_block_head(split, options, lambda text: None, _interrupt_at(9))
    resumed, facts = train(replace(split, resume=True), options)
    # Steps after the save of step 7 are done again.
    assert resumed == whole[7:]
    assert facts["progress"]["step"] == 12
    states = [
        torch.load(f"{folder}/state.pt", weights_only=True) for folder in (run.out, split.out)
    ]
    for name, tensor in states[0]["head"].items():
        assert torch.equal(tensor, states[1]["head"][name]), name
        assert torch.equal(states[0]["ema"][name], states[1]["ema"][name]), name


def test_the_loss_that_is_shown_continues_on_resume(run):
    shown: list[float] = []

    def on_step(step, numbers):
        shown.append(numbers["loss_average"])

    train_block_head(run, replace(OPTIONS, total_steps=6), lambda text: None, on_step)
    lines: list[str] = []
    longer = replace(run, resume=True, log_every=1)
    train_block_head(longer, replace(OPTIONS, total_steps=7), lines.append, on_step)
    losses, _ = train(replace(run, out=f"{run.out}-whole"), replace(OPTIONS, total_steps=6))
    average = losses[0]
    for loss in losses[1:]:
        average = 0.95 * average + 0.05 * loss
    assert shown[5] == pytest.approx(average)
    assert abs(shown[6] - shown[5]) < 0.06 * abs(shown[5])
    assert f"step 7: loss {shown[6]:.4f}" in "\n".join(lines)


def _interrupt_at(limit):
    def on_step(step, _numbers):
        if step == limit:
            raise KeyboardInterrupt

    return on_step


def test_run_leaves_a_loadable_head_with_provenance(run, target_folder):
    lines = []
    _, facts = train(run, OPTIONS, lines.append)
    config = json.loads((target_folder / "config.json").read_text())
    head, extras = load_block_head(f"{run.out}/head", config)
    assert head.config.target_layer_ids == (0, 2)
    assert head.config.causal
    assert head.config.block_size == 4
    ids = extras.target_ids(48)
    assert 2 in ids  # the end-of-turn id is always drafted
    assert torch.equal(ids, ids.sort().values)
    record = json.loads(Path(run.out, "head", "provenance.json").read_text())
    assert record["progress"] == facts["progress"]
    assert record["progress"]["step"] == 12
    assert record["data"] == {
        "sequences": 12,
        "by_source": {"kind0": 6, "kind1": 6},
        "answer_tokens": 12 * 24,
        "draft_vocabulary_coverage": record["data"]["draft_vocabulary_coverage"],
    }
    assert [(r["from_step"], r["loss"]) for r in record["recipes"]] == [(0, "forward_kl")]
    assert record["versions"]["torch"] == torch.__version__
    lengths = record["heldout"]["mean_acceptance_length"]
    assert lengths["chain"] <= lengths["best_first/8"] <= lengths["best_first/32"]
    assert any("mean acceptance length" in line for line in lines)


def test_a_bidirectional_run_starts_from_a_causal_head(run, target_folder, tmp_path):
    """Same weights and draft tokens at step 0, its own mask, and the origin on record."""
    train(run, OPTIONS)
    dflash = replace(
        run,
        out=str(tmp_path / "dflash"),
        causal=False,
        init_from=f"{run.out}/head",
        block_size=0,
        draft_vocab_size=0,
    )
    frozen = replace(
        OPTIONS,
        total_steps=1,
        warmup_steps=0,
        ema_decay=0.0,
        loss="sft",
        learning_rate=1e-30,
        adam_learning_rate=1e-30,
    )
    _, facts = train(dflash, frozen)
    config = json.loads((target_folder / "config.json").read_text())
    first, extras = load_block_head(f"{run.out}/head", config)
    second, second_extras = load_block_head(f"{dflash.out}/head", config)
    assert first.config.causal and not second.config.causal
    assert second.config.block_size == 4
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert torch.equal(extras.d2t, second_extras.d2t)
    assert facts["init_from"]["name"] == "head"
    assert facts["init_from"]["progress"]["step"] == 12
    assert facts["recipes"][0]["position_gamma"] == 2.0  # block 4, in proportion to 4 at 8
    assert facts["recipes"][0]["loss"] == "sft"
    # A resumed run still knows where it began, and its shape.
    _, facts = train(replace(dflash, resume=True, init_from=""), replace(frozen, total_steps=2))
    assert facts["init_from"]["name"] == "head"
    assert facts["shape"]["causal"] is False
    with pytest.raises(ValueError, match=r"num_layers = 1, legal: 2"):
        train(replace(dflash, out=str(tmp_path / "other"), num_layers=1), frozen)


def test_a_run_may_add_to_the_vocabulary_of_a_head_from_before(run, target_folder, tmp_path):
    """Such a head does not say how far it goes, and keeps the tokens that it drafts."""
    few = replace(run, draft_vocab_size=20)
    train(few, replace(OPTIONS, total_steps=1))
    head = Path(few.out, "head")
    config = json.loads((head / "config.json").read_text())
    assert config.pop("max_position_embeddings") > 0
    (head / "config.json").write_text(json.dumps(config))
    more = replace(run, out=str(tmp_path / "more"), init_from=str(head), draft_vocab_size=40)
    train(more, replace(OPTIONS, total_steps=1))
    target = json.loads((target_folder / "config.json").read_text())
    known, grown = (
        set(load_block_head(str(folder), target)[1].target_ids(size).tolist())
        for folder, size in ((head, 20), (Path(more.out, "head"), 40))
    )
    assert len(known) == 20 and len(grown) == 40 and known < grown
    kept = replace(run, out=str(tmp_path / "kept"), init_from=str(head), draft_vocab_size=0)
    train(kept, replace(OPTIONS, total_steps=1))
    ids = load_block_head(str(Path(kept.out, "head")), target)[1].target_ids(20)
    assert set(ids.tolist()) == known


def test_a_larger_head_starts_as_the_smaller_one_and_learns_everywhere(
    run, target_folder, tmp_path
):
    _, facts = train(run, OPTIONS)
    target = json.loads((target_folder / "config.json").read_text())
    small, _ = load_block_head(f"{run.out}/head", target)
    shape = small.config
    larger = replace(
        run,
        out=str(tmp_path / "larger"),
        init_from=f"{run.out}/head",
        num_layers=shape.num_hidden_layers + 1,
        intermediate_size=shape.intermediate_size + 8,
    )
    still = replace(OPTIONS, total_steps=1, learning_rate=1e-30, adam_learning_rate=1e-30)
    _, grown_facts = train(larger, still)
    lengths = "mean_acceptance_length"
    assert grown_facts["heldout"][lengths] == facts["heldout"][lengths]
    start, _ = load_block_head(f"{larger.out}/head", target)
    assert len(start.layers) == shape.num_hidden_layers + 1
    assert start.layers[-1].mlp.gate_proj.weight.any()
    train(replace(larger, out=larger.out + "2"), OPTIONS)
    learnt, _ = load_block_head(f"{larger.out}2/head", target)
    for name, tensor in learnt.state_dict().items():
        assert tensor.any() and not torch.equal(tensor, start.state_dict()[name]), name
    with pytest.raises(ValueError, match=rf"num_layers = 1, legal: {shape.num_hidden_layers} or "):
        train(replace(larger, out=larger.out + "3", num_layers=1), OPTIONS)
    with pytest.raises(ValueError, match=r"num_layers = 9, legal: \d, as in"):
        train(replace(larger, resume=True, num_layers=9), OPTIONS)


def test_bidirectional_heads_learn_but_not_from_short_blocks(run):
    options = replace(OPTIONS, total_steps=40, loss="sft")
    losses, _ = train(replace(run, causal=False), options)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    with pytest.raises(ValueError, match=r"short_block_share = 0\.5, legal: 0"):
        train(
            replace(run, causal=False, out=run.out + "2"),
            replace(OPTIONS, short_block_share=0.5, short_block_size=3),
        )


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (12, 5.0 + 2 / 3), (4, 2.0)]
)
def test_default_gamma_follows_the_block_size_of_bidirectional_heads(block_size, gamma):
    class Config:
        causal = False

    Config.block_size = block_size
    assert default_gamma(Config) == pytest.approx(gamma)
    Config.causal = True
    assert default_gamma(Config) == 4.0


def test_a_run_is_not_overwritten_and_not_resumed_from_nothing(run):
    with pytest.raises(ValueError, match=r"state\.pt does not exist"):
        train(replace(run, resume=True), OPTIONS)
    train(run, replace(OPTIONS, total_steps=1))
    with pytest.raises(ValueError, match="--resume"):
        train(run, OPTIONS)


def test_time_limit_saves_and_can_be_continued(run):
    losses, facts = train(replace(run, max_minutes=1e-9), OPTIONS)
    assert len(losses) == 1
    assert facts["progress"]["step"] == 1
    more, _ = train(replace(run, resume=True), replace(OPTIONS, total_steps=3))
    assert len(more) == 2
    changed = replace(OPTIONS, total_steps=5, position_gamma=2.0)
    _, facts = train(replace(run, resume=True), changed)
    recipes = [(r["from_step"], r["position_gamma"]) for r in facts["recipes"]]
    assert recipes == [(0, 4.0), (1, 4.0), (3, 2.0)]


def test_schedule_warms_up_holds_and_decays_and_can_be_extended():
    options = TrainOptions(total_steps=100, warmup_steps=10, decay_share=0.2)
    scales = [options.lr_scale(step) for step in range(100)]
    assert scales[0] == 0.1
    assert scales[9:80] == [1.0] * 71
    assert scales[90] == pytest.approx(0.5)
    assert 0 < scales[99] < 0.1
    longer = replace(options, total_steps=200)
    assert [longer.lr_scale(s) for s in range(80)] == scales[:80]


def test_data_order_visits_everything_once_an_epoch_and_restores(feature_folders):
    store = FeatureStore(feature_folders[0])
    order = DataOrder(store, 5)
    first = [next(order) for _ in range(12)]
    assert sorted(first) == list(range(12))
    begun = [next(order) for _ in range(4)]
    saved = order.state()
    rest = [next(order) for _ in range(20)]
    again = DataOrder(store, 5)
    again.restore(saved)
    assert [next(again) for _ in range(20)] == rest
    assert sorted(begun + rest[:8]) == list(range(12))
    assert begun + rest[:8] != first
    with pytest.raises(ValueError, match="99 sequences"):
        again.restore({"epoch": 0, "cursor": 0, "size": 99})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", "kl"),
        ("optimizer", "sgd"),
        ("total_steps", 0),
        ("learning_rate", 0.0),
        ("ema_decay", 1.5),
        ("grad_clip", 0.0),
        ("weight_decay", -1.0),
        ("learning_rate", float("nan")),
    ],
)
def test_bad_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} = .*legal"):
        TrainOptions(**{name: value})


def test_draft_vocabulary_is_the_frequent_answer_tokens(feature_folders):
    store = FeatureStore(feature_folders[0])
    tokens = torch.cat([store[i].tokens[store[i].prompt_len :] for i in range(len(store))])
    counts = torch.bincount(tokens, minlength=64)
    ids, coverage = draft_vocabulary(store, 5, 64, always=[2])
    assert 2 in ids
    assert len(set(ids.tolist())) == 5
    others = [i for i in ids.tolist() if i != 2]
    assert counts[others].min() >= counts.sort(descending=True).values[4]
    assert coverage == pytest.approx(float(counts[ids].sum() / counts.sum()))
    whole, all_of_it = draft_vocabulary(store, 64, 64)
    assert torch.equal(whole, torch.arange(64))
    assert all_of_it == 1.0


def test_layer_scales_are_root_mean_squares(feature_folders):
    store = FeatureStore(feature_folders[0])
    scales = layer_scales(store, 2)
    rows = torch.cat([store[i].aux[1:].float() for i in range(len(store))])
    assert scales[1] == pytest.approx(float(rows[:, 32:].pow(2).mean().sqrt()), rel=1e-4)


def test_an_mlp_wider_than_the_targets_is_refused(run):
    with pytest.raises(ValueError, match=r"--intermediate-size 64, legal: up to 48"):
        train(replace(run, intermediate_size=64), OPTIONS)
