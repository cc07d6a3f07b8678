# SPDX-License-Identifier: Apache-2.0
"""A step's trees as layers with a recurrent state take them."""

from __future__ import annotations

import numpy as np
import torch

from vllm_specplug.vllm_attention.state_rows import RequestRows, StateStep
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep


def state_step(step: TreeStep) -> StateStep:
    """For a step in which at least one request has drafts. Drafts that are no tree of the plugin's
    are a line below the root: none of them is accepted."""
    requests = [
        RequestRows(r.first_row, r.root_row, r.end_row, r.num_computed > 0) for r in step.requests
    ]
    parents, start = [], 0
    for r in _drafting(step):
        count = r.end_row - r.root_row
        above = np.arange(-1, count - 2) if r.tree is None else r.tree.parent_indices
        rows = np.concatenate(([-1], start + 1 + above.astype(np.int64)))
        parents.append(rows)
        start += count
    return StateStep(requests, torch.from_numpy(np.concatenate(parents)))


def last_state_rows(step: TreeStep) -> torch.Tensor:
    """The last accepted row of each tree among the rows of all, int64 [R]; the root's where
    nothing was accepted."""
    rows, start = [], 0
    for r in _drafting(step):
        rows.append(start + (r.accepted_path[-1] + 1 if r.accepted_path else 0))
        start += r.end_row - r.root_row
    return torch.tensor(rows)


def accepted_lengths(step: TreeStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens before each tree's root, and its accepted nodes; int64 [R]."""
    trees = _drafting(step)
    contexts = torch.tensor([r.context_len for r in trees])
    return contexts, torch.tensor([len(r.accepted_path) for r in trees])


def _drafting(step: TreeStep) -> list[StepRequest]:
    return [r for r in step.requests if r.end_row > r.root_row + 1]
