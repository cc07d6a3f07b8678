# SPDX-License-Identifier: Apache-2.0
"""The JetSpec drafter builds the trees its candidates call for, within each request's limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.e2e.tiny import make_head
from tests.unit.drafters import requests_of
from tests.unit.methods.block.tiny_drafters import VOCAB, draft_requests, tiny_drafter
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.tree import build_tree


def test_trees_respect_every_limit_and_equal_the_oracle(tmp_path: Path) -> None:
    drafter = tiny_drafter(BlockHeadDrafter, make_head(tmp_path, VOCAB))
    requests = draft_requests()
    ids, log_probs = drafter.candidates(requests, 4, 4)
    assert (log_probs <= 0).all()
    for r, tree in enumerate(drafter.propose(requests)):
        tree.validate()
        assert 0 < tree.num_nodes <= requests.budgets[r]
        assert tree.max_depth <= requests.depths[r]
        oracle = build_tree(
            ids[r].numpy(), log_probs[r].numpy(), requests.budgets[r], tree_width=4,
            tree_depth=requests.depths[r],
        )  # fmt: skip
        assert tree.token_ids.tolist() == oracle.token_ids.tolist()
        assert tree.parent_indices.tolist() == oracle.parent_indices.tolist()


def test_ngram_branches_join_the_tree(tmp_path: Path) -> None:
    requests = draft_requests()
    requests.token_ids[0] = np.array([7, 8, 9, 10, 11, 12, 13, 7, 8, 9, 10])
    drafter = tiny_drafter(BlockHeadDrafter, make_head(tmp_path, VOCAB), ngram_topk=2)
    tree = drafter.propose(requests)[0]
    tree.validate()
    assert tree.child_of(-1, 11) is not None
    assert tree.num_nodes <= requests.budgets[0]


def test_candidates_are_shared_out_by_anchor(tmp_path: Path) -> None:
    """Drafting a request alone gives what drafting it in a batch gives."""
    drafter = tiny_drafter(BlockHeadDrafter, make_head(tmp_path, VOCAB))
    requests = draft_requests()
    together, _ = drafter.candidates(requests, 4, 4)
    for r in range(3):
        alone = requests_of([requests.token_ids[r]], 12, 4, 4)
        assert torch.equal(drafter.candidates(alone, 4, 4)[0][0], together[r])


def test_only_requests_that_want_a_forward_get_the_heads_nodes(tmp_path: Path) -> None:
    drafter = tiny_drafter(BlockHeadDrafter, make_head(tmp_path / "head", VOCAB))
    everyone = drafter.propose(draft_requests())
    requests = draft_requests()
    requests.forward_depths.extend([2, 0, 3])
    trees = drafter.propose(requests)
    assert [tree.num_nodes > 0 for tree in trees] == [True, False, True]
    assert trees[0].max_depth == 2
    assert trees[2].token_ids.tolist() == everyone[2].token_ids.tolist()


def test_without_a_forward_lookups_still_draft(tmp_path: Path) -> None:
    drafter = tiny_drafter(BlockHeadDrafter, make_head(tmp_path / "head", VOCAB), ngram_topk=2)
    drafter.candidates = None  # a forward would fail
    requests = draft_requests()
    requests.forward_depths.extend([0, 0, 0])
    trees = drafter.propose(requests)
    assert [tree.num_nodes > 0 for tree in trees] == [False, False, True]
