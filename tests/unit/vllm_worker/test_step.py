# SPDX-License-Identifier: Apache-2.0
"""Which rows are committed, and where their keys and values end up."""

from __future__ import annotations

import numpy as np

from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep


def _tree(parents: list[int]) -> DraftTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    size = len(parents)
    return DraftTree(
        np.arange(size, dtype=np.int64),
        np.array(parents, dtype=np.int32),
        np.array(depths, dtype=np.int32),
        np.zeros(size, dtype=np.float32),
    )


def test_committed_rows_of_a_mixed_step() -> None:
    prompt = StepRequest(0, 4, 5, num_computed=0, tree=DraftTree.empty())
    branching = StepRequest(5, 5, 10, num_computed=20, tree=_tree([-1, -1, 1, 2]))
    branching.accepted_path = [1, 2]
    padded = StepRequest(10, 11, 14, num_computed=7, tree=None)
    rows, slots, positions = TreeStep([prompt, branching, padded]).committed_rows()
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 10, 11]
    assert slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11]
    assert positions.tolist() == [0, 1, 2, 3, 4, 20, 21, 22, 7, 8]


def test_the_token_after_each_committed_one() -> None:
    """A prompt's chunk ends before a prompt token, a decoding request before its anchor."""
    chunk = StepRequest(0, 4, 5, num_computed=3, tree=DraftTree.empty())
    branching = StepRequest(5, 5, 10, num_computed=20, tree=_tree([-1, -1, 1, 2]))
    branching.accepted_path = [1, 2]
    unknown = StepRequest(10, 11, 14, num_computed=7, tree=None)
    known = [np.arange(100, 130), np.arange(200, 224), np.arange(300, 309)]
    following = TreeStep([chunk, branching, unknown]).next_tokens(known)
    assert following.tolist() == [104, 105, 106, 107, 108, 221, 222, 223, 308, 0]
    assert following.dtype == np.int64


def test_linear_requests_need_no_tree_path() -> None:
    chain = StepRequest(0, 0, 4, 9, _tree([-1, 0, 1]))
    padded = StepRequest(0, 0, 4, 9, None)
    branching = StepRequest(0, 0, 3, 9, _tree([-1, -1]))
    assert chain.is_linear and padded.is_linear and not branching.is_linear
    assert not TreeStep([chain, padded]).has_trees and TreeStep([chain, branching]).has_trees
    assert branching.context_len == 9
    # Recomputed tokens before the root shift it.
    assert StepRequest(2, 5, 8, 9, _tree([-1, -1])).context_len == 12


def test_whose_each_committed_token_is() -> None:
    prompt = StepRequest(0, 4, 5, num_computed=0, tree=DraftTree.empty())
    branching = StepRequest(5, 5, 10, num_computed=20, tree=_tree([-1, -1, 1, 2]))
    branching.accepted_path = [1, 2]
    step = TreeStep([prompt, branching])
    assert step.owners().tolist() == [0] * 5 + [1] * 3
    assert len(step.owners()) == len(step.committed_rows()[0])


def test_a_step_without_drafts_is_its_rows() -> None:
    step = TreeStep.without_drafts([0, 5, 6], [7, 20])
    chunk = StepRequest(0, 4, 5, num_computed=7, tree=DraftTree.empty())
    decoding = StepRequest(5, 5, 6, num_computed=20, tree=DraftTree.empty())
    expected = TreeStep([chunk, decoding])
    assert not step.has_drafts and not step.has_trees
    for own, theirs in zip(step.requests, expected.requests, strict=True):
        assert (own.first_row, own.root_row, own.end_row) == (
            theirs.first_row, theirs.root_row, theirs.end_row,
        )  # fmt: skip
        assert own.num_computed == theirs.num_computed and own.decodes == theirs.decodes
    for own, theirs in zip(step.committed_rows(), expected.committed_rows(), strict=True):
        assert own.tolist() == theirs.tolist()
