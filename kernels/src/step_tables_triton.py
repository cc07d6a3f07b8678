# SPDX-License-Identifier: Apache-2.0
"""Tables of a step in one launch each: its results and trees for the host, and inputs of drafting.

The references are tensor code: `step_table` and `trees_table` of `vllm_v2.host_step`, and
`vllm_v2.draft_inputs`. Sources may be int32 or int64; only their types make variants.

Letters: R requests, S request slots, N nodes of a tree at most, W tokens of a step at most, C
branches, L tokens of a branch at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .step_kernel import step_kernel
from .tree_tensors import Trees

_COLUMNS = 256
"""Columns per iteration: most steps have no more tokens, path rows or nodes."""
_REQUESTS = 128
"""Requests per program of `_draft_inputs_kernel`."""


@step_kernel
def _step_table_kernel(
    # [R]
    slots,
    # [R] or more
    seq_lens,
    # [S] each
    totals,
    computed,
    # [R]
    sampled,
    # [S, token_stride]
    token_ids,
    # [R], and [R, num_paths]; not read if `num_paths` is 0
    lengths,
    path_rows,
    # int32 [R, 4 + width], and 1 + num_paths more columns with a walk; written
    table,
    token_stride,
    width,
    num_paths,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    total = tl.load(totals + slot).to(tl.int32)
    first = 4 + tl.minimum(num_paths, 1)
    out = table + request * (first + width + num_paths)
    tl.store(out, tl.load(seq_lens + request).to(tl.int32))
    tl.store(out + 1, total)
    tl.store(out + 2, tl.load(computed + slot).to(tl.int32))
    tl.store(out + 3, tl.load(sampled + request).to(tl.int32))
    if num_paths > 0:
        tl.store(out + 4, tl.load(lengths + request).to(tl.int32))
    out += first
    # The table of all tokens has more than 2^31 numbers.
    token_ids += slot * token_stride
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        # There is no token before the first one.
        position = tl.maximum(total - width + column, 0)
        token = tl.load(token_ids + position, mask=inside, other=0)
        tl.store(out + column, token.to(tl.int32), mask=inside)
    out += width
    path_rows += request * num_paths
    for begin in range(0, num_paths, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < num_paths
        row = tl.load(path_rows + column, mask=inside, other=0)
        tl.store(out + column, row.to(tl.int32), mask=inside)


def step_table_triton(
    # [R], and [R] or more
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    # [S] each
    totals: torch.Tensor,
    computed: torch.Tensor,
    # [R]
    sampled: torch.Tensor,
    # [S, most tokens]; may be mapped memory of the host
    token_ids: torch.Tensor,
    # [R], and [R, n]
    walk: tuple[torch.Tensor, torch.Tensor] | None,
    width: int,
) -> torch.Tensor:
    """`host_step.step_table`. No host synchronisation.

    Args:
        walk: lengths and rows of the paths; None for a step without drafts.
        width: W.
    """
    num_reqs = len(slots)
    # Without a walk, pointers of the same types avoid a second variant.
    lengths, path_rows = (totals, slots) if walk is None else walk
    num_paths = 0 if walk is None else path_rows.shape[1]
    columns = 4 + (walk is not None) + width + num_paths
    table = torch.empty((num_reqs, columns), dtype=torch.int32, device=slots.device)
    if num_reqs:
        _step_table_kernel[(num_reqs,)](
            slots, seq_lens, totals, computed, sampled, token_ids, lengths, path_rows, table,
            token_ids.stride(0), width, num_paths, BLOCK=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return table


@triton.jit
def _pack_tree(out, token_ids, parents, depths, scores, count, num_nodes, BLOCK: tl.constexpr):
    """`drafting.device_levels.packed_trees` of one tree."""
    tl.store(out, count.to(tl.int32))
    for begin in range(0, num_nodes, BLOCK):
        node = begin + tl.arange(0, BLOCK)
        inside = node < num_nodes
        to = out + 1 + node
        token = tl.load(token_ids + node, mask=inside, other=0)
        tl.store(to, token.to(tl.int32), mask=inside)
        parent = tl.load(parents + node, mask=inside, other=0)
        tl.store(to + num_nodes, parent.to(tl.int32), mask=inside)
        depth = tl.load(depths + node, mask=inside, other=0)
        tl.store(to + 2 * num_nodes, depth.to(tl.int32), mask=inside)
        score = tl.load(scores + node, mask=inside, other=0.0)
        tl.store(to + 3 * num_nodes, score.to(tl.int32, bitcast=True), mask=inside)


@step_kernel
def _trees_table_kernel(
    # [R]
    room,
    # [R, num_nodes] each, scores in float32, and [R]
    token_ids,
    parents,
    depths,
    scores,
    counts,
    # [R, num_lookup] each, and [R]; not read if `num_lookup` is 0
    alone_ids,
    alone_parents,
    alone_depths,
    alone_scores,
    alone_counts,
    # [R, num_branches], and [R, num_tokens]
    sizes,
    branches,
    # int32 [R, 2 + 4 * num_nodes], 1 + 4 * num_lookup more with trees of branches only, and
    # num_branches + num_tokens more; written
    table,
    num_nodes,
    token_stride,
    parent_stride,
    depth_stride,
    score_stride,
    num_lookup,
    num_branches,
    num_tokens,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    of_trees = 1 + 4 * num_nodes
    of_alone = tl.minimum(num_lookup, 1) + 4 * num_lookup
    out = table + request * (1 + of_trees + of_alone + num_branches + num_tokens)
    tl.store(out, tl.load(room + request).to(tl.int32))
    _pack_tree(
        out + 1, token_ids + request * token_stride, parents + request * parent_stride,
        depths + request * depth_stride, scores + request * score_stride,
        tl.load(counts + request), num_nodes, BLOCK,
    )  # fmt: skip
    out += 1 + of_trees
    if num_lookup > 0:
        at = request * num_lookup
        _pack_tree(
            out, alone_ids + at, alone_parents + at, alone_depths + at, alone_scores + at,
            tl.load(alone_counts + request), num_lookup, BLOCK,
        )  # fmt: skip
    out += of_alone
    sizes += request * num_branches
    for begin in range(0, num_branches, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < num_branches
        size = tl.load(sizes + column, mask=inside, other=0)
        tl.store(out + column, size.to(tl.int32), mask=inside)
    out += num_branches
    branches += request * num_tokens
    for begin in range(0, num_tokens, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < num_tokens
        token = tl.load(branches + column, mask=inside, other=0)
        tl.store(out + column, token.to(tl.int32), mask=inside)


def trees_table_triton(
    trees: Trees,
    # [R]
    room: torch.Tensor,
    lookup_only: Trees | None,
    # [R, C], and [R, C, L]
    found: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """`host_step.trees_table`. No host synchronisation.

    Args:
        trees: rows may have any stride; lookup-only trees are contiguous.
    """
    num_reqs, num_nodes = trees[0].shape
    *matrices, counts = trees
    num_lookup = 0 if lookup_only is None else lookup_only[0].shape[1]
    # Without them, pointers of the same types avoid variants.
    sizes = branches = trees[1]
    num_branches, num_tokens = 0, 0
    if found is not None:
        sizes, branches = found
        _, num_branches, length = branches.shape
        num_tokens = num_branches * length
    columns = 2 + 4 * num_nodes + (1 + 4 * num_lookup) * (lookup_only is not None)
    columns += num_branches + num_tokens
    table = torch.empty((num_reqs, columns), dtype=torch.int32, device=counts.device)
    if num_reqs:
        for matrix in matrices:
            # The stride of a single column is undefined.
            assert num_nodes == 1 or matrix.stride(1) == 1, matrix.stride()
        for part in (*(lookup_only or ()), *(found or ())):
            assert part.is_contiguous(), part.stride()
        _trees_table_kernel[(num_reqs,)](
            room.contiguous(), *matrices, counts.contiguous(), *(lookup_only or trees), sizes,
            branches, table, num_nodes, *(matrix.stride(0) for matrix in matrices), num_lookup,
            num_branches, num_tokens, BLOCK=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return table


@step_kernel
def _draft_inputs_kernel(
    # [R]
    slots,
    # [S]
    totals,
    # [R]
    sampled,
    # [S, last_stride], of which the first column is read
    last_sampled,
    # [4, R] int32; see `draft_inputs`
    limits,
    # [R] int64, written
    anchors,
    # [6, stride] int32, of which R columns are written
    numbers,
    num_reqs,
    last_stride,
    stride,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_reqs
    slot = tl.load(slots + request, mask=inside, other=0).to(tl.int64)
    total = tl.load(totals + slot, mask=inside, other=0).to(tl.int32)
    is_decoding = tl.load(sampled + request, mask=inside, other=0) > 0
    anchor = tl.load(last_sampled + slot * last_stride, mask=inside, other=0)
    most = tl.load(limits + request, mask=inside, other=0)
    longest = tl.load(limits + num_reqs + request, mask=inside, other=0)
    forward = tl.load(limits + 3 * num_reqs + request, mask=inside, other=0)
    depth = tl.minimum(longest - total - 1, most)
    budget = tl.where(is_decoding & (depth > 0), most, 0)
    tl.store(anchors + request, anchor.to(tl.int64), mask=inside)
    to = numbers + request
    tl.store(to, total - 1, mask=inside)
    tl.store(to + stride, budget, mask=inside)
    tl.store(to + 2 * stride, depth, mask=inside)
    tl.store(to + 3 * stride, tl.minimum(depth, forward), mask=inside)
    tl.store(to + 4 * stride, tl.where(budget > 0, total, 0), mask=inside)
    tl.store(to + 5 * stride, tl.where(is_decoding, total - 1, -1), mask=inside)


def draft_inputs_triton(
    # [R]
    slots: torch.Tensor,
    # [S]
    totals: torch.Tensor,
    # [R]
    sampled: torch.Tensor,
    # [S, n]
    last_sampled: torch.Tensor,
    # [4, R] int32
    limits: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Returns the fields of `vllm_v2.draft_inputs.DraftInputs`. No host synchronisation."""
    num_reqs, device = len(slots), slots.device
    anchors = torch.empty(num_reqs, dtype=torch.int64, device=device)
    # Rows start at multiples of 16 bytes, as separate tensors do.
    stride = triton.cdiv(num_reqs, 4) * 4
    numbers = torch.empty((6, stride), dtype=torch.int32, device=device)
    if num_reqs:
        _draft_inputs_kernel[(triton.cdiv(num_reqs, _REQUESTS),)](
            slots, totals, sampled, last_sampled, limits, anchors, numbers, num_reqs,
            last_sampled.stride(0), stride, BLOCK=_REQUESTS, num_warps=4,
        )  # fmt: skip
    return (anchors, *numbers[:, :num_reqs].unbind(0))
