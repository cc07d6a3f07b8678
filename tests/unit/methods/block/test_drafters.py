# SPDX-License-Identifier: Apache-2.0
"""Drafters of block heads, with and without a local head, from checkpoints to trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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


def block(folder: Path, settings: Any = None, cls: type = BlockHeadDrafter, **options: Any) -> Any:
    """A drafter over contexts of zeros."""
    torch.manual_seed(0)
    embed, lm_head = torch.randn(2, VOCAB, HIDDEN)
    drafter = load_drafter(cls, folder / "head", settings, lm_head, embed, **options)
    drafter.bind_cache(DenseCache(drafter.cache_specs(), unwritten=0.0))
    return drafter


def dels(folder: Path, weights: tuple[float, ...] = WEIGHTS, anchor_input: bool = False) -> Any:
    local = folder / "local"
    settings = DelsSettings(
        path=str(local / "model.safetensors"), unigram_path=str(local / "unigram.safetensors"),
        alpha=weights, beta=weights, anchor_input=anchor_input, num_candidates=VOCAB,
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


def test_ngram_branches_join_the_tree(folder: Path) -> None:
    requests = draft_requests()
    requests.token_ids[0] = np.array([7, 8, 9, 10, 11, 12, 13, 7, 8, 9, 10])
    drafter = block(folder, ngram_topk=2)
    tree = drafter.propose(requests)[0]
    tree.validate()
    assert tree.child_of(-1, 11) is not None
    assert tree.num_nodes <= requests.budgets[0]
    # Without a forward, which would fail, lookups still draft.
    drafter.candidates = None
    requests = draft_requests()
    requests.forward_depths.extend([0, 0, 0])
    trees = drafter.propose(requests)
    assert [tree.num_nodes > 0 for tree in trees] == [False, False, True]


def test_candidates_are_shared_out_by_anchor(folder: Path) -> None:
    """Drafting a request alone gives what drafting it in a batch gives."""
    drafter, requests = block(folder), draft_requests()
    together, _ = drafter.candidates(requests, 4, 4)
    for r in range(3):
        alone = requests_of([requests.token_ids[r]], 12, 4, 4)
        assert torch.equal(drafter.candidates(alone, 4, 4)[0][0], together[r])


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


def test_the_anchor_changes_depth_one_only_when_it_is_read(folder: Path) -> None:
    weights = (2.0, 0.4, 0.4, 0.4)
    read, plain, unread = (
        drafter.propose(draft_requests())[0].scores[0]
        for drafter in (dels(folder, weights, True), block(folder), dels(folder, (0, *weights[1:])))
    )
    assert read != plain and unread == pytest.approx(float(plain))


def test_a_local_head_of_too_few_tokens_is_refused(folder: Path) -> None:
    few = VOCAB - 3
    config = LocalHeadConfig("markov", VOCAB, HIDDEN, 4, draft_vocab_size=few)
    save_local_head(folder / "local", LocalHead(config), target_ids=torch.arange(few))
    with pytest.raises(ValueError, match=f"scores {few} tokens, and 3 of the {VOCAB}"):
        dels(folder)
