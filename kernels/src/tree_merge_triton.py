# SPDX-License-Identifier: Apache-2.0
"""Merges n-gram branches into a head's trees on the device, with the result of the tree package's
`merge_trees`.

A program has one tree, whose nodes are in registers of its lanes. Each token of a branch is
searched below its parent and appended if it is new. Then the best nodes are taken one by one,
parents first.

Letters: B requests, N nodes of a tree at most, C branches, L tokens of a branch at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .step_kernel import step_kernel
from .tree_tensors import Trees, empty_trees


@step_kernel
def _merge_kernel(
    # trees of the head: [B, N], and [B]
    head_tokens,
    head_parents,
    head_depths,
    head_scores,
    head_counts,
    # [B, C] int32 length of the matched suffix, 0 for no branch
    sizes,
    # [B, C, L] int32, -1 past the end
    branches,
    # [longest suffix, ranks, L] float32 cumulative log-probabilities, -inf past the end
    table,
    # [B] int32
    budgets,
    # [trees, B, N] and [trees, B]
    token_ids,
    parents,
    node_depths,
    scores,
    counts,
    num_nodes,
    num_branches,
    length,
    num_ranks,
    HAS_HEAD: tl.constexpr,
    NODES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    # The second tree of a request has only branches.
    tree = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + request
    node = tl.arange(0, NODES)
    never = float("-inf")
    token = tl.full([NODES], -1, tl.int32)
    parent = tl.full([NODES], -1, tl.int32)
    depth = tl.zeros([NODES], tl.int32)
    score = tl.full([NODES], never, tl.float32)
    count = 0
    if HAS_HEAD:
        count = tl.where(tl.program_id(1) == 0, tl.load(head_counts + request), 0)
        of_head = node < count
        at = request * num_nodes + node
        token = tl.load(head_tokens + at, mask=of_head, other=-1).to(tl.int32)
        parent = tl.load(head_parents + at, mask=of_head, other=-1)
        depth = tl.load(head_depths + at, mask=of_head, other=0)
        score = tl.load(head_scores + at, mask=of_head, other=never)
    for rank in range(num_branches):
        size = tl.load(sizes + request * num_branches + rank)
        by_rank = tl.minimum(rank, num_ranks - 1)
        log_probs = table + ((tl.maximum(size, 1) - 1) * num_ranks + by_rank) * length
        branch = branches + (request * num_branches + rank) * length
        step = 0
        above = -1
        found = tl.load(branch, mask=size > 0, other=-1)
        path = tl.load(log_probs, mask=size > 0, other=never)
        while (found >= 0) & (path > never):
            same = (node < count) & (parent == above) & (token == found)
            known = tl.max(tl.where(same, node, -1), 0)
            index = tl.where(known >= 0, known, count)
            here = node == index
            token = tl.where(here, found, token)
            parent = tl.where(here, above, parent)
            depth = tl.where(here, step + 1, depth)
            score = tl.where(here, tl.maximum(score, path), score)
            count += (known < 0).to(tl.int32)
            above = index
            step += 1
            found = tl.load(branch + step, mask=step < length, other=-1)
            path = tl.load(log_probs + step, mask=step < length, other=never)

    # Best first, equal ones in order: no score is positive, and bits of positive numbers have the
    # order of their values.
    bits = tl.abs(score).to(tl.int32, bitcast=True)
    key = (0x7FFFFFFF - bits).to(tl.int64) * NODES + (NODES - 1 - node)
    key = tl.where(score > never, key, -1)
    order = tl.full([NODES], -1, tl.int32)
    budget = tl.minimum(tl.load(budgets + request), num_nodes)
    taken = 0
    best = tl.max(key, 0)
    while (best >= 0) & (taken < budget):
        here = key == best
        order = tl.where(here, taken, order)
        key = tl.where(here, -1, key)
        taken += 1
        best = tl.max(key, 0)
    new_parent = tl.where(parent >= 0, tl.gather(order, tl.maximum(parent, 0), 0), -1)
    kept = order >= 0
    at = tree * num_nodes + order
    tl.store(token_ids + at, token.to(tl.int64), mask=kept)
    tl.store(parents + at, new_parent, mask=kept)
    tl.store(node_depths + at, depth, mask=kept)
    tl.store(scores + at, score, mask=kept)
    tl.store(counts + tree, taken)


def merge_branches(
    head: Trees | None,
    # [B, C] int32
    sizes: torch.Tensor,
    # [B, C, L] int32
    branches: torch.Tensor,
    # [longest suffix, ranks, L] float32
    table: torch.Tensor,
    # [B] int32
    budgets: torch.Tensor,
    num_nodes: int,
    *,
    lookup_only: bool = False,
) -> Sequence[Trees]:
    """Returns the best nodes of the union of each head's tree and its request's branches, in one
    launch; no host synchronisation.

    Args:
        head: None for branches only.
        num_nodes: N, at least the largest budget.
        lookup_only: whether to return trees of branches only, too.

    Returns:
        The merged trees and, with `lookup_only`, trees of branches only.
    """
    num_reqs, num_branches, length = branches.shape
    count = 1 + lookup_only
    out = empty_trees(count, num_reqs, num_nodes, device=branches.device)
    nodes = triton.next_power_of_2(max(32, num_nodes + num_branches * length))
    _merge_kernel[(num_reqs, count)](
        *(out if head is None else head),
        sizes,
        branches,
        table,
        budgets,
        *out,
        num_nodes,
        num_branches,
        length,
        table.shape[1],
        HAS_HEAD=head is not None,
        NODES=nodes,
        # Reductions stay within a warp where its registers hold the nodes.
        num_warps=min(32, max(1, nodes // 256)),
    )
    return list(zip(*out, strict=True))
