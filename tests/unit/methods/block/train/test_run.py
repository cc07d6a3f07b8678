# SPDX-License-Identifier: Apache-2.0
"""A block head may start from another mask, fewer layers or fewer draft tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.block.speculators_format import HeadTarget
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head
from vllm_specplug.train.target import TargetWeights

LOADERS = {"dflash": load_block_head, "dspark": load_dspark_head}

STILL = {"total_steps": 1, "learning_rate": 1e-30, "adam_learning_rate": 1e-30}


def test_a_bidirectional_run_starts_from_a_causal_head(make_job, target_folder):
    """Same weights and draft tokens at step 0, its own mask, and the origin on record."""
    causal = make_job("jetspec")
    causal.train()
    config = json.loads((causal.head / "config.json").read_text())
    longest = config.pop("max_position_embeddings")  # heads from before do not say it
    (causal.head / "config.json").write_text(json.dumps(config))
    dflash = make_job(
        "dflash", "dflash", init_from=str(causal.head), block_size=0, **STILL, warmup_steps=0,
        ema_decay=0.0,
    )  # fmt: skip
    dflash.train()
    config = json.loads((target_folder / "config.json").read_text())
    first, extras = load_block_head(causal.head, config)
    second, second_extras = load_block_head(dflash.head, config)
    assert first.config.causal and not second.config.causal
    assert second.config.block_size == 4
    assert second.config.max_position_embeddings == longest > 0
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert torch.equal(extras.target_ids, second_extras.target_ids)
    _, facts = dflash.changed(resume=True, total_steps=2).train()
    assert facts["init_from"]["name"] == "head"
    assert facts["init_from"]["progress"]["step"] == 12
    assert facts["recipes"][0]["loss"] == "sft"
    assert facts["shape"]["causal"] is False
    # Without it, the shape would be another.
    with pytest.raises(ValueError, match="init_from = '', but the checkpoint has '.*run/head'"):
        dflash.changed(resume=True, init_from="", total_steps=3).train()
    torch.save(extras.target_ids.flip(0), dflash.run.out / "draft_ids.pt")
    with pytest.raises(ValueError, match="has other draft tokens than the head in --init-from"):
        dflash.changed(resume=True, total_steps=3).train()


def test_a_head_whose_slots_draft_other_tokens_is_refused(make_job):
    first = make_job("dflash", "first", total_steps=1)
    first.train()
    config = json.loads((first.head / "config.json").read_text())
    config["dflash_config"]["sample_from_anchor"] = True
    (first.head / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="samples from the anchor's slot, legal"):
        make_job("dflash", init_from=str(first.head)).train()


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_masks_may_read_a_token_of_the_target(kind, make_job, target_folder):
    """The row is not trained, and a head that starts from another may take it up."""
    target = TargetWeights(target_folder)
    row = target.tables().embed_tokens[5].float()
    first = make_job(kind, total_steps=3)
    first.train()
    new = make_job(kind, "new", total_steps=3, mask_token_id=5)
    continued = make_job(kind, "next", total_steps=3, mask_token_id=5, init_from=str(first.head))
    for job in (new, continued):
        trained = job.trainer().head
        block = trained.block if kind == "dspark" else trained
        assert not isinstance(block.mask_embedding, nn.Parameter)
        assert torch.equal(block.mask_embedding.float(), row)
        job.train()
        written = json.loads((job.head / "config.json").read_text())
        assert written["speculators_model_type"] == kind
        head, extras, *_ = LOADERS[kind](job.head, target.config)
        assert head.config.mask_token_id == 5 and extras.mask_from_embedding
        with pytest.raises(ValueError, match="mask_token_id = None, but the checkpoint has 5"):
            job.changed(resume=True, total_steps=4, mask_token_id=None).train()
    with pytest.raises(ValueError, match=r"--mask-token-id 64, legal: 0\.\.63"):
        make_job(kind, "other", mask_token_id=64).train()


def test_a_head_that_speculators_cannot_load_is_refused(make_job):
    job = make_job("dflash", mask_token_id=5)
    config, ids = job.trainer().head.config, torch.tensor([1, 4, 6])
    assert HeadTarget.of(job.run.target, config, ids, "--x").name == str(job.run.target)
    partial = replace(config, partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match=r"--x with partial_rotary_factor = 0\.5, legal: 1 .*out"):
        HeadTarget.of(job.run.target, partial, ids, "--x")
    with pytest.raises(ValueError, match="tokens in another order, legal: ascending tokens"):
        HeadTarget.of(job.run.target, config, ids.flip(0), "--x")
