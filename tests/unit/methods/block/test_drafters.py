# SPDX-License-Identifier: Apache-2.0
"""Drafters of block heads, with and without a local head, from checkpoints to trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.hard_heads import KINDS, change_head
from tests.e2e.tiny import HIDDEN, make_head, make_local_head
from tests.unit.dense_trees import DenseCache
from tests.unit.drafters import load_drafter, requests_of
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.dels.checkpoint import save_local_head
from vllm_specplug.methods.dels.drafter import DelsDrafter
from vllm_specplug.methods.dels.resolve import DelsSettings
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig
from vllm_specplug.tree import build_tree

VOCAB = 20
WEIGHTS = (0.0, 0.4, 0.5, 0.6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_head(tmp_path / "head", VOCAB, causal=False)
    make_local_head(tmp_path / "local", VOCAB)
    return tmp_path


def block(folder: Path, settings: Any = None, cls: type = BlockHeadDrafter) -> Any:
    """A drafter over contexts of zeros."""
    torch.manual_seed(0)
    embed, lm_head = torch.randn(2, VOCAB, HIDDEN)
    drafter = load_drafter(cls, folder / "head", settings, lm_head, embed)
    drafter.bind_cache(DenseCache(drafter.cache_specs(), unwritten=0.0))
    return drafter


def dels(folder: Path, weights: tuple[float, ...] = WEIGHTS) -> Any:
    local = folder / "local"
    settings = DelsSettings(
        path=str(local / "model.safetensors"), unigram_path=str(local / "unigram.safetensors"),
        alpha=weights, beta=weights, num_candidates=VOCAB,
        gate_table_bytes=1 << 20,
    )  # fmt: skip
    return block(folder, settings, DelsDrafter)


def draft_requests() -> DraftRequests:
    return requests_of([[1, 2, 3], [4], [5, 6, 5, 6]], [12, 5, 9], 4, [4, 1, 3])


@pytest.mark.parametrize("make", [block, dels])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_broken_heads_are_valid_or_empty(make: Any, kind: str, folder: Path) -> None:
    drafter = make(folder)
    change_head(drafter, kind)
    trees = drafter.propose(draft_requests())
    assert all(tree.fault(VOCAB) is None for tree in trees)
    assert kind != "confident" or all(tree.num_nodes for tree in trees)


@pytest.mark.parametrize("make", [block, dels])
def test_trees_respect_every_limit_and_equal_the_oracle(make: Any, folder: Path) -> None:
    drafter, requests = make(folder), draft_requests()
    width = 4 if make is block else VOCAB
    ids, log_probs, *_ = drafter.draft_candidates(requests, 4, width)
    limits = requests.budgets, requests.depths
    oracles = [
        build_tree(ids[r].numpy(), log_probs[r].numpy(), budget, tree_width=4, tree_depth=depth)
        for r, (budget, depth) in enumerate(zip(*limits, strict=True))
    ]
    marginal = oracles[0]
    if make is dels:
        oracles = drafter.local_tree.build(
            ids, log_probs, requests.anchors, *limits, requests.width, compiled=False
        )
        assert oracles[0].token_ids.tolist() != marginal.token_ids.tolist()
    for r, (tree, oracle) in enumerate(zip(drafter.propose(requests), oracles, strict=True)):
        tree.validate()
        assert 0 < tree.num_nodes <= requests.budgets[r]
        assert tree.max_depth <= requests.depths[r]
        assert tree.token_ids.tolist() == oracle.token_ids.tolist()
        assert tree.parent_indices.tolist() == oracle.parent_indices.tolist()


def test_only_requests_that_want_a_forward_get_the_heads_nodes(folder: Path) -> None:
    drafter, requests = block(folder), draft_requests()
    everyone = drafter.propose(draft_requests())
    requests.forward_depths.extend([2, 0, 3])
    trees = drafter.propose(requests)
    assert [tree.num_nodes > 0 for tree in trees] == [True, False, True]
    assert trees[0].max_depth == 2
    assert trees[2].token_ids.tolist() == everyone[2].token_ids.tolist()


def test_weights_of_zero_are_ddtree_exactly(folder: Path) -> None:
    drafters = dels(folder, (0.0,) * 4), block(folder)
    for ours, theirs in zip(*(d.propose(draft_requests()) for d in drafters), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.parent_indices.tolist() == theirs.parent_indices.tolist()
        assert ours.scores.tolist() == theirs.scores.tolist()


def test_a_local_head_of_too_few_tokens_is_refused(folder: Path) -> None:
    few = VOCAB - 3
    config = LocalHeadConfig("markov", VOCAB, HIDDEN, 4, draft_vocab_size=few)
    save_local_head(folder / "local", LocalHead(config), target_ids=torch.arange(few))
    with pytest.raises(ValueError, match=f"scores {few} tokens, and 3 of the {VOCAB}"):
        dels(folder)
