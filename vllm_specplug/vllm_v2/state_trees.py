# SPDX-License-Identifier: Apache-2.0
"""A step's trees in the form that layers with a recurrent state take.

The host knows how many rows each request has, also in steps that it prepares ahead. Parents and
accepted paths stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_specplug.kernels import to_device
from vllm_specplug.tree.step_trees import ROOT, StepTrees, Walk
from vllm_specplug.vllm_attention.state_rows import StateStep
from vllm_specplug.vllm_attention.tree_rows import RequestRows


def state_step(
    input_batch: Any, trees: StepTrees, make: Callable[..., StateStep] = StateStep
) -> StateStep:
    """Returns the trees of a step in which at least one request has drafts. Unreachable rows are
    children of their root.

    Args:
        make: the `StateStep` class of the device.
    """
    ends = input_batch.query_start_loc_np.tolist()
    computed = input_batch.num_computed_tokens_np.tolist()
    requests = [
        RequestRows(ends[i], ends[i + 1] - rows, ends[i + 1], computed[i])
        for i, rows in enumerate(_row_counts(input_batch).tolist())
    ]
    parents, above = trees.parent_rows, trees.above
    if not all(request.is_tree for request in requests):
        kept, shifts = _kept_rows(input_batch, above.device)
        parents, above = parents[kept], above[kept] - shifts
    return make(requests, torch.where(parents == ROOT, ROOT, above))


def last_state_rows(input_batch: Any, walk: Walk) -> torch.Tensor:
    """Returns int64 [R]: the last accepted row of each tree among the rows of all trees, which is
    the root if no node was accepted."""
    last = walk.path_rows.gather(1, walk.lengths[:, None].long())[:, 0]
    counts = _row_counts(input_batch)
    drafting = np.flatnonzero(counts > 1)
    if len(drafting) == len(counts):
        return last
    lost = np.where(counts > 1, 0, counts).cumsum()[drafting]
    return last[to_device(drafting, last.device)] - to_device(lost, last.device)


def accepted_lengths(
    input_batch: Any, trees: StepTrees, walk: Walk
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the number of tokens before each root and of accepted nodes, each int64 [R]."""
    contexts, lengths = trees.rows.contexts, walk.lengths
    is_drafting = _row_counts(input_batch) > 1
    if not is_drafting.all():
        drafting = to_device(np.flatnonzero(is_drafting), lengths.device)
        contexts, lengths = contexts[drafting], lengths[drafting]
    return contexts.long(), lengths.long()


def _row_counts(input_batch: Any) -> np.ndarray:
    """Returns the number of logits rows of each request: its root and its drafts."""
    counts: np.ndarray = np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1])
    return counts.astype(np.int64)


def _kept_rows(input_batch: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits rows of requests with drafts, and for each how many rows of requests
    without drafts precede it."""
    counts = _row_counts(input_batch)
    is_kept = np.repeat(counts > 1, counts)
    shifts = np.repeat(np.where(counts > 1, 0, counts).cumsum(), counts)
    return to_device(np.flatnonzero(is_kept), device), to_device(shifts[is_kept], device)
