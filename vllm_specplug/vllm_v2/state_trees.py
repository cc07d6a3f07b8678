# SPDX-License-Identifier: Apache-2.0
"""A step's trees in the form that layers with a recurrent state take.

The host knows how many rows each request has, also in steps that it prepares ahead. Parents and
accepted paths stay on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_specplug.kernels import to_device
from vllm_specplug.tree.step_trees import ROOT, StepTrees, Walk
from vllm_specplug.vllm_attention.state_rows import StateStep
from vllm_specplug.vllm_attention.tree_rows import RequestRows


def state_step(input_batch: Any, trees: StepTrees, make: type[StateStep]) -> StateStep:
    """Returns the trees of a step in which at least one request has drafts. Unreachable rows are
    children of their root.

    Args:
        make: the `StateStep` class of the device.
    """
    ends = input_batch.query_start_loc_np.tolist()
    computed = input_batch.num_computed_tokens_np.tolist()
    counts = np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1]).astype(np.int64)
    requests = [
        RequestRows(ends[i], ends[i + 1] - rows, ends[i + 1], computed[i])
        for i, rows in enumerate(counts.tolist())
    ]
    parents, above = trees.parent_rows, trees.above
    is_tree = counts > 1
    if not is_tree.all():
        kept = np.flatnonzero(np.repeat(is_tree, counts))
        # Rows of requests without drafts before each row.
        shifts = np.repeat(np.where(is_tree, 0, counts).cumsum(), counts)[kept]
        rows = to_device(kept, above.device)
        parents, above = parents[rows], above[rows] - to_device(shifts, above.device)
    return make(requests, torch.where(parents == ROOT, ROOT, above))


def commit_paths(states: StateStep, trees: StepTrees, walk: Walk) -> None:
    """Applies the accepted paths to the states of the requests with drafts."""
    last = walk.path_rows.gather(1, walk.lengths[:, None].long())[:, 0] - trees.rows.starts[:-1]
    drafting = states.requests
    states.commit(
        states.starts[:-1] + last[drafting],
        trees.rows.contexts[drafting].long(),
        walk.lengths[drafting].long(),
    )
