# SPDX-License-Identifier: Apache-2.0
"""Exact best-first trees on the device, equal to those of the tree package's builder.

One warp per request keeps the heap in registers. The next sibling of a popped candidate takes its
slot and the first child a new slot, so `budget` + 1 slots are enough. Scores are float64, so that
paths with equal summands tie as in the other builders.

Letters: B requests, D depths, K candidates per depth, N nodes at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .step_kernel import step_kernel
from .tree_tensors import Trees, empty_trees


@step_kernel
def _build_best_first_kernel(
    # [B, D, K] int64
    top_ids,
    # [B, D, K] float32
    top_log_probs,
    # [B] int32
    budgets,
    # [B] int32
    depths,
    # [B, N] int64, int32, int32, float32
    token_ids,
    parents,
    node_depths,
    scores,
    # [B] int32
    counts,
    num_depths,
    width,
    max_width,
    num_nodes,
    HEAP_SIZE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    budget = tl.load(budgets + request)
    rows = tl.minimum(tl.load(depths + request), num_depths)
    ranks = tl.minimum(width, max_width)
    ids = top_ids + request * num_depths * width
    logps = top_log_probs + request * num_depths * width
    at = request * num_nodes

    slot = tl.arange(0, HEAP_SIZE)
    never = float("-inf")
    first = tl.load(logps).to(tl.float64)
    # A candidate that is not finite gets the score -inf, which is never popped.
    usable = (budget > 0) & (rows > 0) & (first > never) & (first < float("inf"))
    # Clamp log-probabilities to 0, so that a child never scores more than its parent.
    score = tl.where((slot == 0) & usable, tl.minimum(first, 0.0), never)
    base = tl.zeros([HEAP_SIZE], tl.float64)
    # Order of insertion breaks ties, earlier first. At most 2 * N.
    order = tl.zeros([HEAP_SIZE], tl.int32)
    # Parent + 1, depth - 1 and rank of each candidate.
    above = tl.zeros([HEAP_SIZE], tl.int32)
    level = tl.zeros([HEAP_SIZE], tl.int32)
    rank = tl.zeros([HEAP_SIZE], tl.int32)
    entered = 1
    node = 0
    best = tl.max(score, 0)
    while (best > never) & (node < budget):
        earliest = tl.min(tl.where(score == best, order, 1 << 30), 0)
        chosen = (score == best) & (order == earliest)
        my_above = tl.sum(tl.where(chosen, above, 0), 0)
        my_level = tl.sum(tl.where(chosen, level, 0), 0)
        my_rank = tl.sum(tl.where(chosen, rank, 0), 0)
        my_base = tl.sum(tl.where(chosen, base, 0.0), 0)
        tl.store(token_ids + at + node, tl.load(ids + my_level * width + my_rank))
        tl.store(parents + at + node, my_above - 1)
        tl.store(node_depths + at + node, my_level + 1)
        tl.store(scores + at + node, best.to(tl.float32))
        node += 1
        # The next sibling takes the popped candidate's slot, or the slot becomes empty.
        more = my_rank + 1 < ranks
        logp = tl.load(logps + my_level * width + my_rank + 1, mask=more, other=never)
        logp = logp.to(tl.float64)
        more = more & (logp > never) & (logp < float("inf"))
        score = tl.where(chosen, tl.where(more, my_base + tl.minimum(logp, 0.0), never), score)
        order = tl.where(chosen, entered, order)
        rank = tl.where(chosen, my_rank + 1, rank)
        entered += more.to(tl.int32)
        # The first child takes a new slot.
        more = my_level + 1 < rows
        logp = tl.load(logps + (my_level + 1) * width, mask=more, other=never).to(tl.float64)
        more = more & (logp > never) & (logp < float("inf"))
        new = slot == node
        score = tl.where(new, tl.where(more, best + tl.minimum(logp, 0.0), never), score)
        base = tl.where(new, best, base)
        order = tl.where(new, entered, order)
        above = tl.where(new, node, above)
        level = tl.where(new, my_level + 1, level)
        rank = tl.where(new, 0, rank)
        entered += more.to(tl.int32)
        best = tl.max(score, 0)
    tl.store(counts + request, node)


def build_best_first_triton(
    # [B, D, K] int64
    top_ids: torch.Tensor,
    # [B, D, K] float32
    top_log_probs: torch.Tensor,
    # [B] int32
    budgets: torch.Tensor,
    # [B] int32
    depths: torch.Tensor,
    max_width: int,
    num_nodes: int,
) -> Trees:
    """`dispatch.build_best_first` on the device; no host synchronisation.

    Args:
        num_nodes: N, at least the largest budget. The host knows it without synchronisation.
    """
    num_reqs, num_depths, width = top_ids.shape
    trees = empty_trees(num_reqs, num_nodes, device=top_ids.device)
    trees[-1].zero_()
    if num_reqs and num_nodes and num_depths and width:
        _build_best_first_kernel[(num_reqs,)](
            top_ids.contiguous(),
            top_log_probs.contiguous(),
            budgets,
            depths,
            *trees,
            num_depths,
            width,
            max_width,
            num_nodes,
            HEAP_SIZE=_heap_size(num_nodes),
            # One warp: reductions stay within it.
            num_warps=1,
        )
    return trees


def _heap_size(num_nodes: int) -> int:
    """Returns slots for the candidates of a tree of `num_nodes` nodes; each size is compiled."""
    return max(32, triton.next_power_of_2(num_nodes + 1))


def warm_up_builder(num_nodes: int, device: torch.device) -> None:
    """Compiles the kernels for trees of up to `num_nodes` nodes."""
    ids = torch.zeros((1, 1, 1), dtype=torch.int64, device=device)
    log_probs = torch.zeros((1, 1, 1), device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    nodes = 1
    while nodes <= num_nodes:
        build_best_first_triton(ids, log_probs, one, one, 1, nodes)
        nodes = _heap_size(nodes)
