# SPDX-License-Identifier: Apache-2.0
"""Merges the attention of split trees from their parts, by log-sum-exp.

With o_s and l_s = log sum exp(scores) of part s, the result is
o = sum_s exp(l_s - l) o_s with l = log sum_s exp(l_s). Parts are summed in their order.

Letters: P slots for parts, M' rows of a slot, R trees, T rows of the output, H heads, Dh head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Log-sums per load.
_LANES = tl.constexpr(64)
# Arguments that change between steps must not make new variants of the kernel.
_STEP_NUMBERS = ["plan_stride", "part_rows"]


@triton.jit(do_not_specialize=_STEP_NUMBERS)
def _merge_parts_kernel(
    # [P, M', H, Dh]
    part_out,
    # [P, M', H] natural logarithms, -inf for a row that attends nothing of a part
    part_lse,
    # [R, 2] int32: slot of a tree's first part and number of its parts
    part_record,
    # [T, H, Dh]
    output,
    # [5, R] int32: request, first query row, rows, context length, first mask row
    plan,
    plan_stride,
    part_rows,
    output_row,
    output_head,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    tree = tl.program_id(2)
    # Trees without rows are neither read nor written.
    if row >= tl.load(plan + 2 * plan_stride + tree):
        return
    parts = tl.load(part_record + 2 * tree + 1)
    if parts <= 1:
        return
    heads = tl.num_programs(1)
    slot = tl.load(part_record + 2 * tree).to(tl.int64)
    first = (slot * part_rows + row) * heads + head
    step = part_rows.to(tl.int64) * heads
    lse_at = part_lse + first
    lanes = tl.arange(0, _LANES)
    highest = tl.full([_LANES], float("-inf"), tl.float32)
    for base in range(0, parts, _LANES):
        other = base + lanes
        lse = tl.load(lse_at + other * step, mask=other < parts, other=float("-inf"))
        highest = tl.maximum(highest, lse)
    # The row's own column is in some part, so this is finite.
    top = tl.max(highest, 0)
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    total = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    at = part_out + first * HEAD_DIM
    for _ in range(parts):
        one = tl.load(lse_at)
        # The output of a part that a row does not attend is undefined, and 0 * NaN is NaN.
        if one != float("-inf"):
            weight = tl.exp(one - top)
            acc += tl.load(at + dims, mask=in_head, other=0.0) * weight
            total += weight
        lse_at += step
        at += step * HEAD_DIM
    to_row = row.to(tl.int64) + tl.load(plan + plan_stride + tree)
    at = output + to_row * output_row + head * output_head
    tl.store(at + dims, (acc / total).to(output.dtype.element_ty), mask=in_head)


def merge_parts(
    # [P, M', H, Dh] float32
    part_out: torch.Tensor,
    # [P, M', H] float32
    part_lse: torch.Tensor,
    # [R, 2] int32
    part_record: torch.Tensor,
    # [T, H, Dh], written in place
    output: torch.Tensor,
    # [5, R] int32
    plan: torch.Tensor,
) -> None:
    """Merges the parts of every tree that has several into its rows of `output`.

    Args:
        part_lse: natural logarithm of each part's softmax sum; -inf marks a row that attends
            nothing of a part, whose values are not read. Contiguous, as are `part_out` and
            `part_record`.
        part_record: slot of a tree's first part, and number of parts, which are in consecutive
            slots.
    """
    _, part_rows, num_heads, head_dim = part_out.shape
    assert output.stride(2) == 1, output.stride()
    _merge_parts_kernel[(part_rows, num_heads, plan.shape[1])](
        part_out,
        part_lse,
        part_record,
        output,
        plan,
        plan.stride(0),
        part_rows,
        *output.stride()[:2],
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        num_warps=2,
    )
