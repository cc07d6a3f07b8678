# SPDX-License-Identifier: Apache-2.0
"""Reads V2's private state and returns plain step objects to the rest of the package.

vLLM's names: `idx_mapping` has the slot of each request of the batch, `logits_indices` the rows of
the forward that have logits, and `cu_num_logits` the first logits row of each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.step_trees import StepRows, Walk
from vllm_specplug.vllm_worker.cost.draft_planner import StepRequest


def step_rows(input_batch: Any, max_nodes: int) -> StepRows:
    """Returns the logits rows of a step with drafts. Does not synchronise with the host."""
    starts = input_batch.cu_num_logits
    counts = starts[1:] - starts[:-1]
    num_rows = int(input_batch.cu_num_logits_np[-1])
    num_reqs = input_batch.num_reqs
    return StepRows(
        slots=input_batch.idx_mapping,
        starts=starts,
        contexts=input_batch.seq_lens[:num_reqs] - counts,
        row_slots=input_batch.expanded_idx_mapping,
        local_pos=input_batch.expanded_local_pos,
        query_rows=input_batch.logits_indices,
        max_rows=max_nodes + 1,
        # Padding rows may hold anything, as in vLLM's own attention.
        covers_batch=num_rows == input_batch.num_tokens,
        max_context=int(input_batch.seq_lens_cpu_upper_bound.max()),
        max_request_rows=int(np.diff(input_batch.cu_num_logits_np[: num_reqs + 1]).max()),
    )


def verified_step(
    input_batch: Any,
    trees: Mapping[str, DraftTree],
    walk: Walk | None,
    seq_lens: torch.Tensor | np.ndarray,
) -> list[StepRequest]:
    """Returns a step's requests in batch order, with trees cut to what was scheduled.

    Args:
        trees: trees of running requests, by request.
        walk: on the host; None in a step without drafts.
        seq_lens: the batch's lengths on the host.
    """
    empty = DraftTree.empty()
    ends = input_batch.query_start_loc_np.tolist()
    roots = input_batch.cu_num_logits_np.tolist()
    tokens = seq_lens.tolist()
    lengths = [0] * len(input_batch.req_ids) if walk is None else walk.lengths.tolist()
    paths = None if walk is None else walk.path_rows.numpy()
    requests = []
    for i, req_id in enumerate(input_batch.req_ids):
        scheduled = roots[i + 1] - roots[i] - 1
        path: list[int] = []
        if paths is not None and lengths[i]:
            path = (paths[i, 1 : lengths[i] + 1] - roots[i] - 1).tolist()
        requests.append(
            StepRequest(
                first_row=ends[i],
                root_row=ends[i + 1] - scheduled - 1,
                end_row=ends[i + 1],
                num_computed=tokens[i] - (ends[i + 1] - ends[i]),
                tree=trees.get(req_id, empty).prefix(scheduled),
                accepted_path=path,
            )
        )
    return requests


@dataclass(frozen=True)
class HostBatch:
    """The R requests of a batch after a step, for a draft on the host."""

    # [R] in the batch's order
    req_ids: Sequence[str]
    # [R] arrays of tokens int32 [>= total]; views
    tokens: Sequence[np.ndarray]
    # [R] committed tokens, the last sampled one included
    totals: np.ndarray
    # [R] number of tokens at which vLLM ends the request: its prompt plus `max_tokens`
    max_lens: np.ndarray
    # [R] tokens in the cache
    computed: np.ndarray
    # [R] tokens that the step sampled; 0 in a prompt, whose requests get no drafts
    sampled: np.ndarray
