# SPDX-License-Identifier: Apache-2.0
"""A step's trees as layers with a recurrent state take them.

How many rows each request has is known on the host, also of steps prepared ahead; which row is
whose parent and what was accepted stays on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_specplug.vllm_attention.state_rows import RequestRows, StateStep
from vllm_specplug.vllm_v2.device_trees import ROOT, StepTrees, Walk


def state_step(input_batch: Any, trees: StepTrees) -> StateStep:
    """For a step in which at least one request has drafts. What no walk can reach hangs below its
    root."""
    ends = input_batch.query_start_loc_np.tolist()
    computed = input_batch.num_computed_tokens_np.tolist()
    requests = [
        RequestRows(ends[i], ends[i + 1] - rows, ends[i + 1], computed[i] > 0)
        for i, rows in enumerate(_row_counts(input_batch).tolist())
    ]
    kept, shifts = _kept_rows(input_batch)
    parents = torch.where(trees.parent_rows[kept] == ROOT, ROOT, trees.above[kept] - shifts)
    return StateStep(requests, parents)


def last_state_rows(input_batch: Any, walk: Walk) -> torch.Tensor:
    """The last accepted row of each tree among the rows of all, int64 [R]; the root's where
    nothing was accepted."""
    last = walk.path_rows.gather(1, walk.lengths[:, None].long())[:, 0]
    counts = _row_counts(input_batch)
    lost = np.where(counts > 1, 0, counts).cumsum()
    drafting = torch.from_numpy(np.flatnonzero(counts > 1))
    return last[drafting] - torch.from_numpy(lost)[drafting]


def accepted_lengths(
    input_batch: Any, trees: StepTrees, walk: Walk
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens before each tree's root, and its accepted nodes; int64 [R]."""
    drafting = torch.from_numpy(np.flatnonzero(_row_counts(input_batch) > 1))
    return trees.rows.contexts[drafting].long(), walk.lengths[drafting].long()


def _row_counts(input_batch: Any) -> np.ndarray:
    """Logits rows of each request: its root and its drafts."""
    counts: np.ndarray = np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1])
    return counts.astype(np.int64)


def _kept_rows(input_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits rows of requests with drafts, and how many rows of others stand before each."""
    counts = _row_counts(input_batch)
    is_kept = np.repeat(counts > 1, counts)
    shifts = np.repeat(np.where(counts > 1, 0, counts).cumsum(), counts)
    return torch.from_numpy(np.flatnonzero(is_kept)), torch.from_numpy(shifts[is_kept])
