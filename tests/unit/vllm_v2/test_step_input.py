# SPDX-License-Identifier: Apache-2.0
"""What drafters are told of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.unit.tree.candidates import tree_of
from tests.unit.vllm_v2.steps import SLOTS, VOCAB, input_batch, stored
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.step_trees import TreeStore, attach_trees, walk_trees
from vllm_specplug.vllm_v2.speculator import TreeSpeculator
from vllm_specplug.vllm_v2.step_input import step_rows, verified_step


def test_the_token_after_each_row() -> None:
    """A prompt's chunk ends before a prompt token, a decoding request before its anchor."""
    tokens = torch.arange(SLOTS * 100).view(SLOTS, 100)
    totals = torch.tensor([0, 30, 9, 0, 24, 0, 0])
    states = SimpleNamespace(
        total_len=SimpleNamespace(gpu=totals), all_token_ids=SimpleNamespace(gpu=tokens)
    )
    batch = input_batch([1, 4, 2], [3, 20, 7], [4, 2, 1])
    batch.query_start_loc = torch.tensor([0, 5, 8, 10])
    # The last row of the last request has the request's last token.
    positions = torch.tensor([3, 4, 5, 6, 7, 20, 21, 22, 7, 8])
    made: Any = SimpleNamespace(
        spec=SimpleNamespace(reads_next_tokens=True), req_states=states, max_model_len=100
    )
    following = TreeSpeculator._next_tokens(made, batch, SimpleNamespace(positions=positions))
    assert following is not None and following.dtype == torch.int64
    assert following.tolist() == [104, 105, 106, 107, 108, 421, 422, 423, 208, 0]
    made.spec.reads_next_tokens = False
    assert TreeSpeculator._next_tokens(made, batch, None) is None


def _batch(prompt_rows: list[int]) -> Any:
    """Three requests with 3, 0 and 2 scheduled drafts behind contexts of 40, 60 and 80 tokens."""
    batch = input_batch([1, 4, 2], [40, 60, 80], [3, 0, 2], prompt_rows)
    batch.req_ids = ["a", "b", "c"]
    rows = [before + drafts + 1 for before, drafts in zip(prompt_rows, (3, 0, 2), strict=True)]
    batch.query_start_loc_np = np.concatenate([[0], np.cumsum(rows)])
    return batch


def test_a_verified_step_is_what_was_scheduled_and_what_was_accepted() -> None:
    tree = tree_of([5, 3, 4, 2], [-1, -1, 0, 2])
    batch = _batch([0, 0, 0])
    store = TreeStore(SLOTS, 4, VOCAB, torch.device("cpu"))
    tokens = stored(store, [tree, DraftTree.empty(), DraftTree.empty()], [1, 4, 2], [40, 60, 80])
    trees = attach_trees(store, step_rows(batch, 4))
    rows = torch.cat([torch.tensor([0]), tokens[0, :3], torch.tensor([0, 0]), tokens[2, :2]])
    # The target says 5, then 4 below it, and nothing of what fills unused rows.
    samples = torch.tensor([5, 4, 0, 1, 1, 1, 1, 1])
    walk = walk_trees(trees, samples, rows)
    step = verified_step(batch, {"a": tree}, walk, batch.seq_lens)
    found = [
        (r.first_row, r.root_row, r.end_row, r.context_len, r.tree.num_nodes, r.accepted_path)
        for r in step
    ]
    # The tree had a node more than rows.
    assert found == [(0, 0, 4, 40, 3, [0, 2]), (4, 4, 5, 60, 0, []), (5, 5, 8, 80, 0, [])]


def test_rows_before_a_root_are_no_drafts() -> None:
    batch = _batch([0, 6, 0])
    request = verified_step(batch, {}, None, batch.seq_lens)[1]
    assert (request.first_row, request.root_row, request.end_row) == (4, 10, 11)
    assert (request.num_computed, request.context_len) == (54, 60)
