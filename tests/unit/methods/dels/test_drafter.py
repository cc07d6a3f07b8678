# SPDX-License-Identifier: Apache-2.0
"""The DeLS drafter: block head and local head from their checkpoints to trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.tiny import HIDDEN, make_head, make_local_head
from tests.unit.methods.block.tiny_drafters import VOCAB, draft_requests
from tests.unit.methods.dels.dels_drafters import load_drafter
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.dels.checkpoint import save_local_head
from vllm_specplug.methods.dels.drafter import DelsDrafter
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig
from vllm_specplug.tree import build_tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_head(tmp_path / "head", VOCAB, causal=False)
    make_local_head(tmp_path / "local", VOCAB)
    return tmp_path


def test_trees_respect_every_limit_and_follow_the_fused_scores(folder: Path) -> None:
    drafter = load_drafter(DelsDrafter, folder, (0.0, 0.4, 0.5, 0.6))
    requests = draft_requests()
    ids, log_probs, _ = drafter.draft_candidates(requests, 4, VOCAB)
    oracle = drafter.local_tree.build(
        ids, log_probs, requests.anchors, requests.budgets, requests.depths, requests.width,
        compiled=False,
    )  # fmt: skip
    trees = drafter.propose(requests)
    for r, tree in enumerate(trees):
        tree.validate()
        assert 0 < tree.num_nodes <= requests.budgets[r]
        assert tree.max_depth <= requests.depths[r]
        assert tree.token_ids.tolist() == oracle[r].token_ids.tolist()
    marginal = build_tree(ids[0].numpy(), log_probs[0].numpy(), 12, tree_width=4, tree_depth=4)
    assert trees[0].token_ids.tolist() != marginal.token_ids.tolist()


def test_weights_of_zero_are_ddtree_exactly(folder: Path) -> None:
    without = load_drafter(DelsDrafter, folder, (0.0,) * 4).propose(draft_requests())
    ddtree = load_drafter(BlockHeadDrafter, folder, (0.0,) * 4).propose(draft_requests())
    for ours, theirs in zip(without, ddtree, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.parent_indices.tolist() == theirs.parent_indices.tolist()
        assert ours.scores.tolist() == theirs.scores.tolist()


def test_the_anchor_changes_depth_one_only_when_it_is_read(folder: Path) -> None:
    weights = (2.0, 0.4, 0.4, 0.4)
    read = load_drafter(DelsDrafter, folder, weights, anchor_input=True).propose(draft_requests())
    block = load_drafter(BlockHeadDrafter, folder, weights).propose(draft_requests())
    assert read[0].scores[0] != block[0].scores[0]
    unread = load_drafter(DelsDrafter, folder, (0.0, *weights[1:])).propose(draft_requests())
    assert unread[0].scores[0] == pytest.approx(float(block[0].scores[0]))


def test_a_local_head_of_too_few_tokens_is_refused(folder: Path) -> None:
    head = LocalHead(
        LocalHeadConfig(
            kind="markov",
            vocab_size=VOCAB,
            target_hidden_size=HIDDEN,
            rank=4,
            draft_vocab_size=VOCAB - 3,
        )
    )
    save_local_head(folder / "local", head, target_ids=torch.arange(VOCAB - 3))
    with pytest.raises(ValueError, match=f"scores {VOCAB - 3} tokens, and 3 of the {VOCAB}"):
        load_drafter(DelsDrafter, folder, (0.0, 0.3, 0.3, 0.3))
