# SPDX-License-Identifier: Apache-2.0
"""The published losses, and heads of the published layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.e2e.tiny import make_block_head, make_dspark_head
from tests.unit.methods.block import published
from tests.unit.methods.block.published import tiny
from tests.unit.methods.block.published_heads import PublishedHead
from tests.unit.train.heads import Job
from vllm_specplug.methods.dspark_tree.checkpoint import (
    load_dspark_head,
    save_dspark_head,
)
from vllm_specplug.methods.dspark_tree.config import DSparkConfig
from vllm_specplug.methods.dspark_tree.train.loss import markov_loss
from vllm_specplug.registry import recognise_head
from vllm_specplug.train.target import TargetWeights


def test_the_loss_is_the_published_one() -> None:
    torch.manual_seed(0)
    rows, vocab, hidden, rank = 23, 11, 6, 3
    parts = [torch.randn(rows, hidden), torch.randn(rows, rank), torch.randn(vocab, rank)]
    lm_head, teacher = torch.randn(vocab, hidden), torch.randn(rows, hidden)
    labels, weights = torch.randint(-1, vocab, (rows,)), torch.rand(rows)
    assert (labels < 0).any()
    for ce, l1 in ((0.1, 0.9), (1.0, 0.0), (0.0, 1.0)):
        own = [p.clone().requires_grad_() for p in parts]
        total, accepted = markov_loss(
            *own, lm_head, teacher, labels, weights, ce=ce, l1=l1, chunk=7
        )
        (3 * total).backward()
        plain = [p.clone().requires_grad_() for p in parts]
        logits = plain[0] @ lm_head.T + plain[1] @ plain[2].T
        p, q = logits.softmax(-1), (teacher @ lm_head.T).softmax(-1)
        distance = (p - q).abs().sum(-1)
        entropy = F.cross_entropy(logits, labels, reduction="none", ignore_index=-1)
        expected = ((ce * entropy + l1 * distance) * weights * (labels >= 0)).sum()
        (3 * expected).backward()
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(accepted, torch.minimum(p, q).sum(-1))
        for a, b in zip(own, plain, strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


def test_the_head_has_the_published_layout(make_job: Callable[..., Job], tmp_path: Path) -> None:
    job = make_job("dspark", total_steps=24)
    _, facts = job.train()
    target = TargetWeights(job.run.target).config
    assert recognise_head(job.head).name == "dspark_tree"
    head, extras, markov, confidence = load_dspark_head(job.head, target)
    assert head.config.sample_from_anchor and head.config.num_draft_tokens == 4
    assert markov is not None and markov.low_rank_lm_head.weight.shape == (48, 8)
    # It learns with the rest: it starts from small weights and reads both of its inputs.
    assert confidence is not None
    assert confidence.weight.abs().max() > 0 and confidence.of_token.std() > 0
    assert markov.low_rank_lm_head.weight.abs().max() > 0
    assert len(set(extras.target_ids.tolist())) == 48
    assert len(facts["heldout"]["slot_accuracy"]) == 4
    # The trained mask and the map of a reduced vocabulary are this project's additions.
    theirs = PublishedHead(tmp_path / "published", tiny(published.DEEPSPEC_DSPARK_QWEN3_4B))
    names = {name.replace("layers.1.", "layers.0.") for name in theirs.tensors}
    written = set(load_file(job.head / "model.safetensors"))
    assert written - {"mask_embedding", "d2t"} == names - {"embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("anchor", [True, False])
def test_a_written_head_says_which_slot_drafts_first(anchor: bool, tmp_path: Path) -> None:
    block = make_block_head(30, causal=False, anchor=anchor)
    save_dspark_head(tmp_path, block, torch.randn(30, 4), torch.randn(30, 4))
    config = DSparkConfig.from_pretrained(tmp_path, num_target_layers=2)
    assert config.sample_from_anchor == anchor


@pytest.mark.parametrize("kind", ["gated", "rnn", "domino"])
def test_a_head_that_reads_the_blocks_states_is_not_trained(
    kind: str, make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job("dspark")
    target = TargetWeights(job.run.target).config
    head = make_dspark_head(
        tmp_path, target["vocab_size"], kind=kind, hidden=target["hidden_size"], windows=(None,)
    )
    with pytest.raises(ValueError, match="--init-from .* legal: a head with markov_head_type"):
        make_job("dspark", "b", init_from=str(head)).train()


@pytest.mark.full
def test_a_run_starts_from_a_block_head_and_keeps_a_markov_rank(
    make_job: Callable[..., Job],
) -> None:
    block = make_job("dflash", "block", num_layers=1, total_steps=1)
    block.train()
    first = make_job("dspark", "a", init_from=str(block.head), total_steps=1)
    _, facts = first.train()
    assert facts["init_from"]["progress"]["step"] == 1
    assert facts["shape"]["draft_vocab_size"] == 48
    again = make_job("dspark", "b", init_from=str(first.head), markov_rank=5, total_steps=1)
    assert again.train()[1]["shape"]["markov_rank"] == 8
