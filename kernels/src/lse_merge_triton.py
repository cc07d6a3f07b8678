# SPDX-License-Identifier: Apache-2.0
"""Merges attention over disjoint parts of the context, by their log-sum-exp.

With o_s and l_s = log sum exp(scores) of part s, the whole is
o = sum_s exp(l_s - l) o_s with l = log sum_s exp(l_s).

Letters: S parts, M rows of the parts, T rows of the output, H heads, Dh head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_PARTS = 64


# Numbers that change from step to step must not make new variants of the kernel.
_STEP_NUMBERS = ["num_parts", "plan_stride", "parts_split", "lse_split"]


@triton.jit(do_not_specialize=_STEP_NUMBERS)
def _merge_states_kernel(
    # [S, M, H, Dh]
    parts,
    # [S, M, H] natural logarithms, -inf for an empty part
    part_lse,
    # [T, H, Dh]
    output,
    # [T, H]; written when STORE_LSE
    merged_lse,
    # [5, R] int32: request, first query row, rows, context length, first mask row; when HAS_PLAN
    plan,
    plan_stride,
    num_parts,
    parts_split,
    parts_row,
    parts_head,
    lse_split,
    lse_row,
    output_row,
    output_head,
    merged_row,
    merged_head,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    HAS_PLAN: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    to_row = row
    if HAS_PLAN:
        tree = tl.program_id(2)
        if row >= tl.load(plan + 2 * plan_stride + tree):
            return
        to_row = row + tl.load(plan + plan_stride + tree)
        row = row + tl.load(plan + 4 * plan_stride + tree)
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    part = tl.arange(0, MAX_PARTS).to(tl.int64)
    lse_at = part_lse + row * lse_row + head
    lse = tl.load(lse_at + part * lse_split, mask=part < num_parts, other=float("-inf"))
    top = tl.max(lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lse - base), 0)
    acc = tl.zeros([PADDED_DIM], tl.float32)
    at = parts + row * parts_row + head * parts_head
    for _ in range(num_parts):
        one = tl.load(lse_at)
        # An empty part was never written: its numbers must not be read, 0 * NaN is NaN.
        if one != float("-inf"):
            value = tl.load(at + dims, mask=in_head, other=0.0).to(tl.float32)
            acc += value * tl.exp(one - base)
        lse_at += lse_split
        at += parts_split
    # All parts may be empty: zeros then, and -inf.
    acc = acc / tl.where(total > 0.0, total, 1.0)
    at = output + to_row * output_row + head * output_head
    tl.store(at + dims, acc.to(output.dtype.element_ty), mask=in_head)
    if STORE_LSE:
        tl.store(merged_lse + to_row * merged_row + head * merged_head, base + tl.log(total))


def merge_states(
    # [S, M, H, Dh], S at most 64
    parts: torch.Tensor,
    # [S, M, H] float32
    part_lse: torch.Tensor,
    # [T, H, Dh], written in place
    output: torch.Tensor,
    *,
    # [5, R] int32
    plan: torch.Tensor | None = None,
    max_rows: int = 0,
    # [T, H] float32
    merged_lse: torch.Tensor | None = None,
) -> None:
    """Merges S parts of every row into `output`.

    Args:
        part_lse: natural logarithm of each part's softmax sum; -inf marks an empty part, whose
            values are not read. Contiguous in H. A row whose parts are all empty gives zeros.
        plan: of tree attention: row mask_start + i of the parts goes to output row row_start + i
            of each tree. Without it rows keep their place.
        max_rows: most rows of a tree, with `plan`.
        merged_lse: takes the logarithm of the whole sum, when given.
    """
    num_parts, num_rows, num_heads, head_dim = parts.shape
    assert 1 <= num_parts <= MAX_PARTS, num_parts
    assert part_lse.stride(2) == 1 and parts.stride(3) == 1 and output.stride(2) == 1
    grid = (num_rows, num_heads, 1) if plan is None else (max_rows, num_heads, plan.shape[1])
    if 0 in grid:
        return
    _merge_states_kernel[grid](
        parts,
        part_lse,
        output,
        part_lse if merged_lse is None else merged_lse,
        part_lse if plan is None else plan,
        0 if plan is None else plan.stride(0),
        num_parts,
        *parts.stride()[:3],
        *part_lse.stride()[:2],
        *output.stride()[:2],
        *((0, 0) if merged_lse is None else merged_lse.stride()),
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        MAX_PARTS=MAX_PARTS,
        HAS_PLAN=plan is not None,
        STORE_LSE=merged_lse is not None,
        num_warps=2,
    )
