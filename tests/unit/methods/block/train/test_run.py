# SPDX-License-Identifier: Apache-2.0
"""A block head may start from another mask, fewer layers or fewer draft tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.block.train.objective import default_gamma

STILL = {"total_steps": 1, "learning_rate": 1e-30, "adam_learning_rate": 1e-30}


def test_a_new_head_has_the_end_of_turn_token_and_is_measured(make_job, target_folder):
    job = make_job("jetspec")
    _, facts = job.train()
    config = json.loads((target_folder / "config.json").read_text())
    head, extras = load_block_head(job.head, config)
    assert (head.config.target_layer_ids, head.config.causal) == ((0, 2), True)
    assert head.config.block_size == 4
    ids = extras.target_ids
    assert 2 in ids  # the end-of-turn id is always drafted
    assert torch.equal(ids, ids.sort().values)
    assert len(facts["heldout"]["slot_accuracy"]) == 3
    assert any("mean acceptance length" in line for line in job.lines)


def test_a_bidirectional_run_starts_from_a_causal_head(make_job, target_folder, tmp_path):
    """Same weights and draft tokens at step 0, its own mask, and the origin on record."""
    causal = make_job("jetspec")
    causal.train()
    given = {"init_from": str(causal.head), "block_size": 0, "draft_vocab_size": 0}
    dflash = make_job("dflash", "dflash", **given, **STILL, warmup_steps=0, ema_decay=0.0)
    dflash.train()
    config = json.loads((target_folder / "config.json").read_text())
    first, extras = load_block_head(causal.head, config)
    second, second_extras = load_block_head(dflash.head, config)
    assert first.config.causal and not second.config.causal
    assert second.config.block_size == 4
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert torch.equal(extras.target_ids, second_extras.target_ids)
    # A resumed run still knows where it began, and its shape.
    _, facts = dflash.changed(resume=True, init_from="", total_steps=2).train()
    assert facts["init_from"]["name"] == "head"
    assert facts["init_from"]["progress"]["step"] == 12
    assert facts["recipes"][0]["loss"] == "sft"
    assert facts["shape"]["causal"] is False
    with pytest.raises(ValueError, match=r"num_layers = 1, legal: 2"):
        dflash.changed(out=tmp_path / "other", num_layers=1).train()


def test_a_run_may_add_to_the_vocabulary_of_a_head_from_before(make_job, target_folder):
    """Such a head does not say how far it goes, and keeps the tokens that it drafts."""
    few = make_job("jetspec", draft_vocab_size=20, total_steps=1)
    few.train()
    config = json.loads((few.head / "config.json").read_text())
    assert config.pop("max_position_embeddings") > 0
    (few.head / "config.json").write_text(json.dumps(config))
    target = json.loads((target_folder / "config.json").read_text())

    def tokens(head: Path) -> set[int]:
        return set(load_block_head(head, target)[1].target_ids.tolist())

    for size, drafted in ((40, 40), (0, 20)):
        more = make_job(
            "jetspec", f"{size}", init_from=str(few.head), draft_vocab_size=size, total_steps=1
        )
        more.train()
        known, grown = tokens(few.head), tokens(more.head)
        assert len(known) == 20 and len(grown) == drafted and known <= grown


def test_a_larger_head_starts_as_the_smaller_one_and_learns_everywhere(
    make_job, target_folder, tmp_path
):
    job = make_job("jetspec")
    _, facts = job.train()
    target = json.loads((target_folder / "config.json").read_text())
    shape = load_block_head(job.head, target)[0].config
    larger = job.changed(
        out=tmp_path / "larger",
        init_from=str(job.head),
        num_layers=shape.num_hidden_layers + 1,
        intermediate_size=shape.intermediate_size + 8,
    )
    still = larger.changed(**STILL)
    _, grown_facts = still.train()
    lengths = "mean_acceptance_length"
    assert grown_facts["heldout"][lengths] == facts["heldout"][lengths]
    start, _ = load_block_head(still.head, target)
    assert len(start.layers) == shape.num_hidden_layers + 1
    assert start.layers[-1].mlp.gate_proj.weight.any()
    learning = larger.changed(out=tmp_path / "learning")
    learning.train()
    learnt, _ = load_block_head(learning.head, target)
    for name, tensor in learnt.state_dict().items():
        assert tensor.any() and not torch.equal(tensor, start.state_dict()[name]), name
    with pytest.raises(ValueError, match=rf"num_layers = 1, legal: {shape.num_hidden_layers} or "):
        larger.changed(out=tmp_path / "smaller", num_layers=1).train()
    with pytest.raises(ValueError, match=r"num_layers = 9, legal: \d, as in"):
        larger.changed(resume=True, num_layers=9).train()


def test_bidirectional_heads_refuse_short_blocks(make_job):
    with pytest.raises(ValueError, match=r"short_block_share = 0\.5, legal: 0"):
        make_job("dflash", short_block_share=0.5, short_block_size=3).train()


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
