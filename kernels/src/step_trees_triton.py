# SPDX-License-Identifier: Apache-2.0
"""A step's trees on the device: the walk, its commits, and trees for the next step.

`tree.step_trees` has the references in tensor code, which take dozens of launches instead of one.
A program has one request. Only the block size makes variants.

Letters: R requests, N nodes of a tree at most, M logits rows of the step (of each request a root,
then its scheduled nodes), T rows of the forward, S request slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .step_kernel import step_kernel

MOST_ENDS = 128
"""Limit of the tokens that end a request."""


def _block(rows: int) -> int:
    return triton.next_power_of_2(max(16, rows))


@step_kernel
def _walk_kernel(
    # [M] the target's sample at every row, and the token of every row; those of roots are not read
    samples,
    token_ids,
    # [M] int32: row of the parent; negative for roots and unreachable rows
    parent_rows,
    # [R + 1] int32: first row of each tree
    starts,
    # [R] int64, and [S, `num_ends`] int64: tokens that end each slot's request
    slots,
    ends,
    # [R, N + 1] int64 each
    emitted,
    path_rows,
    # [R, N] int32
    nodes,
    # [R] int32
    lengths,
    max_rows,
    num_ends,
    ROWS: tl.constexpr,
    ENDS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    row = tl.arange(0, ROWS)
    valid = row < count
    token = tl.load(token_ids + start + row, mask=valid, other=-1)
    parent = tl.load(parent_rows + start + row, mask=valid, other=-1) - start
    end = tl.arange(0, ENDS)
    slot = tl.load(slots + request)
    end = tl.load(ends + slot * num_ends + end, mask=end < num_ends, other=-1)
    path = tl.zeros([ROWS], tl.int32)
    at = 0
    depth = 0
    while at >= 0:
        path = tl.where(row == depth, at, path)
        sample = tl.load(samples + start + at)
        # Siblings never repeat a token: at most one row matches. Rows ascend, so that this ends.
        is_child = valid & (row > at) & (parent == at) & (token == sample)
        child = tl.max(tl.where(is_child, row, -1), 0)
        is_end = tl.max((end == sample).to(tl.int32), 0) > 0
        at = tl.where(is_end, -1, child)
        depth += 1
    tl.store(lengths + request, depth - 1)
    inside = row < max_rows
    # Past its end the path has the root.
    tl.store(path_rows + request * max_rows + row, start + path, mask=inside)
    token = tl.load(samples + start + path, mask=inside)
    tl.store(emitted + request * max_rows + row, token, mask=inside)
    to = nodes + request * (max_rows - 1) + row - 1
    tl.store(to, path - 1, mask=inside & (row > 0))


def walk_trees_triton(
    # [M] int64
    samples: torch.Tensor,
    # [M]
    token_ids: torch.Tensor,
    # [M] int32
    parent_rows: torch.Tensor,
    # [R + 1] int32
    starts: torch.Tensor,
    max_rows: int,
    # [R], and [S, up to MOST_ENDS] int64, -1 where there are no more
    slots: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walks R trees at once, each while the target's sample is a child. No host synchronisation.

    Args:
        samples: the target's next token at every row; only those of visited rows are read.
        token_ids: token of every row; anything at roots.
        parent_rows: row of each row's parent, negative for roots and unreachable rows.
        starts: first row of each tree, and M.
        max_rows: N + 1.
        slots: slots of the requests; only with `ends`.
        ends: tokens that end each slot's request, which are not accepted.

    Returns:
        Emitted tokens and rows of the path, int64 [R, N + 1], with the root's past its end; the
        number of accepted nodes, int32 [R], and the nodes, int32 [R, N], -1 past the end.
    """
    num_reqs, device = len(starts) - 1, samples.device
    emitted = torch.empty((num_reqs, max_rows), dtype=torch.int64, device=device)
    path_rows = torch.empty((num_reqs, max_rows), dtype=torch.int64, device=device)
    nodes = torch.empty((num_reqs, max_rows - 1), dtype=torch.int32, device=device)
    lengths = torch.empty(num_reqs, dtype=torch.int32, device=device)
    if slots is None or ends is None:
        # Ends are not read.
        slots, ends = path_rows, path_rows[:, :0]
    assert ends.shape[1] <= MOST_ENDS, ends.shape
    if num_reqs:
        _walk_kernel[(num_reqs,)](
            samples, token_ids, parent_rows, starts, slots, ends, emitted, path_rows, nodes,
            lengths, max_rows, ends.shape[1], ROWS=_block(max_rows), ENDS=MOST_ENDS,
            # One warp: reductions stay within it.
            num_warps=1,
        )  # fmt: skip
    return emitted, path_rows, lengths, nodes


@step_kernel
def _commit_kernel(
    # [R + 1] int32: first logits row of each request
    starts,
    # [M] int64: row of the forward
    query_rows,
    # [R] int32: tokens before the root
    contexts,
    # [R, N + 1] int64, and [R] int32, from the walk
    path_rows,
    lengths,
    # [T] each
    slot_mapping,
    positions,
    # [T] each, written
    computed_rows,
    slots,
    linear,
    # [R] int64, written
    last_rows,
    max_rows,
    num_reqs,
    num_rows,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + request)
    next_start = tl.load(starts + request + 1)
    # A request's logits rows are its last rows.
    root = tl.load(query_rows + start)
    first = tl.load(query_rows + start - 1, mask=request > 0, other=-1) + 1
    end = tl.load(query_rows + next_start - 1) + 1
    end = tl.where(request == num_reqs - 1, num_rows, end)
    context = tl.load(contexts + request)
    length = tl.load(lengths + request)
    path_rows += request * max_rows
    last = tl.load(path_rows + length) - start
    tl.store(last_rows + request, root + last)
    for begin in range(first, end, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        inside = row < end
        tree_row = row - root
        in_tree = inside & (tree_row >= 0) & (tree_row < next_start - start)
        source = tl.load(path_rows + tree_row, mask=in_tree, other=0) - start
        tl.store(computed_rows + row, tl.where(in_tree, root + source, row), mask=inside)
        slot = tl.load(slot_mapping + row, mask=inside)
        tl.store(slots + row, tl.where(in_tree & (tree_row > length), -1, slot), mask=inside)
        position = tl.load(positions + row, mask=inside)
        tl.store(linear + row, tl.where(in_tree, context + tree_row, position), mask=inside)


def committed_rows_triton(
    # [R + 1] int32, [M] int64, [R] int32
    starts: torch.Tensor,
    query_rows: torch.Tensor,
    contexts: torch.Tensor,
    # [R, N + 1] int64, [R] int32
    path_rows: torch.Tensor,
    lengths: torch.Tensor,
    # [T] int64 each
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`step_trees.CommitMap`: computed rows, slots, positions [T], and last rows [R]. No host
    synchronisation."""
    num_reqs, max_rows = path_rows.shape
    sizes = (len(positions), len(positions), len(positions), num_reqs)
    computed, slots, linear, last = (
        torch.empty(size, dtype=torch.int64, device=positions.device) for size in sizes
    )
    if num_reqs:
        _commit_kernel[(num_reqs,)](
            starts, query_rows, contexts, path_rows, lengths, slot_mapping, positions, computed,
            slots, linear, last, max_rows, num_reqs, len(positions), BLOCK=_COMMITTED, num_warps=4,
        )  # fmt: skip
    return computed, slots, linear, last


# Rows per iteration: enough for a step of few trees; a prompt chunk takes several.
_COMMITTED = 512


@step_kernel
def _put_kernel(
    # [R] each
    slots,
    root_positions,
    # [R, N] each; undefined past the counts
    token_ids,
    parents,
    # [R] each; the minimum is kept
    counts,
    room,
    # [R, N]
    scores,
    # [R, N] int64, written
    legal_ids,
    # [S, N] int32, int32, float32, and [S] int32; rows of the slots are written
    kept_parents,
    kept_depths,
    kept_scores,
    kept_roots,
    num_nodes,
    vocab_size,
    token_stride,
    parent_stride,
    score_stride,
    NODES: tl.constexpr,
    ROUNDS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    given = tl.load(token_ids + request * token_stride + node, mask=inside, other=0).to(tl.int64)
    token = tl.minimum(tl.maximum(given, 0), vocab_size - 1)
    parent = tl.load(parents + request * parent_stride + node, mask=inside, other=0).to(tl.int32)
    count = tl.load(counts + request).to(tl.int32)
    count = tl.minimum(count, tl.load(room + request).to(tl.int32))
    broken = (node >= count) | (given != token)
    broken = broken | (parent < -1) | (parent >= node)
    # Whether an earlier sibling has the same token.
    key = (parent.to(tl.int64) << 32) | token
    for begin in range(0, num_nodes, OTHERS):
        other = begin + tl.arange(0, OTHERS)
        exists = other < num_nodes
        its = tl.load(token_ids + request * token_stride + other, mask=exists, other=0)
        its = its.to(tl.int64)
        its = tl.minimum(tl.maximum(its, 0), vocab_size - 1)
        above = tl.load(parents + request * parent_stride + other, mask=exists, other=0)
        its = (above.to(tl.int64) << 32) | its
        repeats = (key[:, None] == its[None, :]) & (other[None, :] < node[:, None])
        broken = broken | (tl.max(repeats.to(tl.int32), 1) > 0)
    # Children of the root and malformed nodes are their own parents.
    is_deep = (broken == 0) & (parent >= 0)
    above = tl.where(is_deep, parent, node)
    depth = is_deep.to(tl.int32)
    for _ in tl.static_range(ROUNDS):
        depth += tl.gather(depth, above, 0)
        above = tl.gather(above, above, 0)
    tl.store(legal_ids + request * num_nodes + node, token, mask=inside)
    to = slot * num_nodes + node
    tl.store(kept_parents + to, tl.where(broken, -2, parent), mask=inside)
    tl.store(kept_depths + to, depth + 1, mask=inside)
    score = tl.load(scores + request * score_stride + node, mask=inside, other=0.0)
    tl.store(kept_scores + to, score, mask=inside)
    tl.store(kept_roots + slot, tl.load(root_positions + request).to(tl.int32))


def put_trees_triton(
    # [R]
    slots: torch.Tensor,
    root_positions: torch.Tensor,
    # [R, N]
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    # [R]
    counts: torch.Tensor,
    # [R, N]
    scores: torch.Tensor,
    # [S, N] int32, int32, float32, and [S] int32, written in place
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    vocab_size: int,
    # [R]
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stores one tree per slot without malformed nodes; see `TreeStore.put`. No host
    synchronisation.

    Returns:
        Token ids int64 [R, N], all in the vocabulary.
    """
    num_reqs, num_nodes = token_ids.shape
    legal_ids = torch.empty((num_reqs, num_nodes), dtype=torch.int64, device=token_ids.device)
    if not num_reqs:
        return legal_ids
    for matrix in (token_ids, parents, scores):
        # The stride of a single column is undefined.
        assert num_nodes == 1 or matrix.stride(1) == 1, matrix.stride()
    nodes = _block(num_nodes)
    _put_kernel[(num_reqs,)](
        slots.contiguous(), root_positions.contiguous(), token_ids, parents, counts.contiguous(),
        (counts if room is None else room).contiguous(), scores, legal_ids, *kept, num_nodes,
        vocab_size,
        token_ids.stride(0), parents.stride(0), scores.stride(0), NODES=nodes,
        # Doubling rounds: a node may be as deep as there are nodes.
        ROUNDS=nodes.bit_length() - 1,
        OTHERS=16,
        num_warps=4,
    )  # fmt: skip
    return legal_ids


@step_kernel
def _attach_kernel(
    # [S, N] int32 each, and [S] int32
    kept_parents,
    kept_depths,
    kept_roots,
    # [R] int64
    slots,
    # [R + 1] int32: first logits row of each request
    starts,
    # [R] int32: tokens before the root
    contexts,
    # [M] int32, int32, int64, written
    parent_rows,
    depths,
    above,
    num_nodes,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    slot = tl.load(slots + request).to(tl.int64)
    is_kept = tl.load(kept_roots + slot) == tl.load(contexts + request)
    row = tl.arange(0, ROWS)
    is_node = (row > 0) & (row < count)
    is_known = is_node & is_kept
    at = slot * num_nodes + row - 1
    parent = tl.load(kept_parents + at, mask=is_known, other=-2)
    parent_row = tl.where(parent >= -1, start + 1 + parent, -2)
    depth = tl.load(kept_depths + at, mask=is_known, other=0)
    inside = row < count
    tl.store(parent_rows + start + row, tl.where(is_node, parent_row, -1), mask=inside)
    tl.store(depths + start + row, tl.where(is_known, depth, row), mask=inside)
    tl.store(above + start + row, tl.where(parent_row >= 0, parent_row, start), mask=inside)


def attach_trees_triton(
    # [S, N] int32 each, and [S] int32
    kept_parents: torch.Tensor,
    kept_depths: torch.Tensor,
    kept_roots: torch.Tensor,
    # [R], [R + 1] int32, [R] int32
    slots: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns parent rows and depths int32 [M], and rows above int64 [M], of a step's requests; see
    `step_trees.StepTrees`. No host synchronisation."""
    num_nodes, device = kept_parents.shape[1], slots.device
    parent_rows = torch.empty(num_rows, dtype=torch.int32, device=device)
    depths = torch.empty(num_rows, dtype=torch.int32, device=device)
    above = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows:
        _attach_kernel[(len(slots),)](
            kept_parents, kept_depths, kept_roots, slots, starts, contexts, parent_rows,
            depths, above, num_nodes, ROWS=_block(num_nodes + 1), num_warps=4,
        )  # fmt: skip
    return parent_rows, depths, above


@step_kernel
def _positions_kernel(
    # [R + 1] int32, [R] int32
    starts,
    contexts,
    # [M] int32
    depths,
    # [M] int64
    query_rows,
    # [T] int64, written
    positions,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(starts + request)
    row = start + tl.arange(0, ROWS)
    inside = row < tl.load(starts + request + 1)
    position = tl.load(contexts + request) + tl.load(depths + row, mask=inside)
    to = tl.load(query_rows + row, mask=inside)
    tl.store(positions + to, position, mask=inside)


def set_positions_triton(
    # [R + 1] int32, [R] int32
    starts: torch.Tensor,
    contexts: torch.Tensor,
    # [M] int32, [M] int64
    depths: torch.Tensor,
    query_rows: torch.Tensor,
    # [T] int64, written in place
    positions: torch.Tensor,
    max_rows: int,
) -> None:
    """Writes each logits row's position: its root's plus its depth. No host synchronisation."""
    if len(query_rows):
        _positions_kernel[(len(contexts),)](
            starts, contexts, depths, query_rows, positions, ROWS=_block(max_rows), num_warps=4
        )


@step_kernel
def _plan_kernel(
    # [P + 1] int32, and [P] int32: tokens at the end of the forward
    query_starts,
    seq_lens,
    # [R + 1] int32 and [M] int64: the logits rows of the first R requests; R may be 0
    tree_starts,
    above,
    # [5, P], [P + 1] and [T] int32, written
    plan,
    starts,
    parents,
    num_requests,
    num_trees,
    num_rows,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(query_starts + request)
    end = tl.load(query_starts + request + 1)
    count = end - first
    tl.store(starts + request, first)
    tl.store(starts + num_requests, end, mask=request == num_requests - 1)
    tl.store(plan + request, request)
    tl.store(plan + num_requests + request, first)
    tl.store(plan + 2 * num_requests + request, count)
    # In a capture vLLM's lengths may be shorter than its rows.
    context = tl.maximum(tl.load(seq_lens + request) - count, 0)
    tl.store(plan + 3 * num_requests + request, context)
    tl.store(plan + 4 * num_requests + request, first)
    has_tree = request < num_trees
    tree = tl.load(tree_starts + request, mask=has_tree, other=0)
    tree_rows = tl.load(tree_starts + request + 1, mask=has_tree, other=0) - tree
    # A chain up to the root, and the tree below it.
    root = count - tree_rows
    for begin in range(0, count, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        node = row - root
        is_node = (node > 0) & (row < count)
        its = tl.load(above + tree + node, mask=is_node & has_tree, other=0)
        parent = tl.where(is_node & has_tree, root + (its - tree).to(tl.int32), row - 1)
        inside = (row < count) & (first + row < num_rows)
        tl.store(parents + first + row, parent, mask=inside)


def fill_plan_triton(
    # [P + 1] int32, [P] int32
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    # [R + 1] int32 and [M] int64; not read if R is 0
    tree_starts: torch.Tensor,
    above: torch.Tensor,
    num_trees: int,
    # [5, P], [P + 1] and [T] int32, written in place
    plan: torch.Tensor,
    starts: torch.Tensor,
    parents: torch.Tensor,
    max_rows: int,
) -> None:
    """Fills a padded step's `TreeAttnMetadata`: plan, query starts, parent rows. Leaves rows after
    the last request's unchanged. No host synchronisation.

    Args:
        tree_starts: first logits row of each of the first R requests, and M.
        above: the row above each of them.
        num_trees: R.
    """
    _plan_kernel[(len(seq_lens),)](
        query_starts, seq_lens, tree_starts, above, plan, starts, parents, len(seq_lens),
        num_trees, len(parents), BLOCK=_block(max_rows), num_warps=4,
    )  # fmt: skip
