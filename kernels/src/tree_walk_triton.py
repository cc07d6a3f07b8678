# SPDX-License-Identifier: Apache-2.0
"""The walk on the device: one target sample per visited node, down while it is a child.

`accept.walk.walk_trees` is the readable version. The samples may be made for all rows beforehand
(greedy decoding, or plain sampling without per-request state): each row's sample is a draw from
the target's distribution at that node, and those of rows that are not visited are never looked at.

Letters: R requests, M tree rows (root first, then its nodes), D depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["emitted_stride", "paths_stride"],
    do_not_specialize_on_alignment=["samples", "token_ids", "parents", "starts"],
)
def _walk_kernel(
    # [M] int64: the target's sample at every row
    samples,
    # [M] int64: token of every row; roots are not looked at
    token_ids,
    # [M] int32: row of the parent in its own tree, -1 for a root
    parents,
    # [R + 1] int32: first row of each tree
    starts,
    # [R, D + 1] int32, filled with -1 past the end
    emitted,
    # [R, D] int32: accepted nodes
    paths,
    # [R] int32
    lengths,
    emitted_stride,
    paths_stride,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    row = tl.arange(0, ROWS)
    valid = (row > 0) & (row < count)
    token = tl.load(token_ids + start + row, mask=valid, other=-1)
    parent = tl.load(parents + start + row, mask=valid, other=-2)
    at = 0
    depth = 0
    while at >= 0:
        sample = tl.load(samples + start + at)
        tl.store(emitted + request * emitted_stride + depth, sample.to(tl.int32))
        # Siblings never repeat a token: at most one row matches.
        child = tl.max(tl.where(valid & (parent == at) & (token == sample), row, -1), 0)
        if child >= 0:
            tl.store(paths + request * paths_stride + depth, child - 1)
            depth += 1
        at = child
    tl.store(lengths + request, depth)


def walk_trees_triton(
    # [M] int64
    samples: torch.Tensor,
    # [M] int64
    token_ids: torch.Tensor,
    # [M] int32
    parents: torch.Tensor,
    # [R + 1] int32
    starts: torch.Tensor,
    max_rows: int,
    max_depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walks R trees at once. No host synchronisation.

    Args:
        samples: the target's next token at every row.
        token_ids: drafted token of every row; anything at roots.
        parents: row of each row's parent within its own tree, -1 at roots.
        starts: first row of each tree, and M.
        max_rows: most rows of a tree.
        max_depth: deepest node of a tree.

    Returns:
        Emitted tokens int32 [R, max_depth + 1], padded with -1; accepted node indices int32
        [R, max_depth], of which the lengths int32 [R] count.
    """
    num_reqs = starts.numel() - 1
    emitted = torch.full((num_reqs, max_depth + 1), -1, dtype=torch.int32, device=samples.device)
    paths = torch.zeros((num_reqs, max_depth), dtype=torch.int32, device=samples.device)
    lengths = torch.zeros(num_reqs, dtype=torch.int32, device=samples.device)
    if num_reqs:
        rows = triton.next_power_of_2(max(16, max_rows))
        _walk_kernel[(num_reqs,)](
            samples,
            token_ids,
            parents,
            starts,
            emitted,
            paths,
            lengths,
            emitted.stride(0),
            paths.stride(0),
            ROWS=rows,
            # One warp: reductions stay within it.
            num_warps=1,
        )
    return emitted, paths, lengths
