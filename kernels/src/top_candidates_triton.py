# SPDX-License-Identifier: Apache-2.0
"""Top-k of rows of logits on the device, with one read of the logits in their own dtype.

The first launch splits each row into parts. A program reads its part in chunks and keeps a list of
the best entries; after the first chunk few entries still enter the list. The second launch merges
the lists of the parts, one program per row. The list length is the warp size for every k, so that
reductions need no barrier and k does not select a variant. The workspace is 8 bytes per part and
candidate and 4 per part: 163 KB for 480 rows, 151,936 tokens and 8 candidates. Small batches are
split into more parts: 15 rows still give four programs per SM of an H100.

Letters: T rows, V vocabulary, P parts of a row, K candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cuda_contract import MOST_CANDIDATES

# Entries of a chunk, and entries of the parts' lists that the merge loads at once.
_CHUNK = 4096
_SLOTS = 1024
# Programs that fill a large device: three waves of five on each of 132 SMs.
_PROGRAMS = 2048
_LIST_SIZE = tl.constexpr(MOST_CANDIDATES)
# Greater than every token id; the ids of empty slots are just below it.
_NO_ID = tl.constexpr((1 << 31) - 1)


@triton.jit
def _empty_list(count):
    """Returns values and ids of an empty list of `count` slots; the other slots never change."""
    slot = tl.arange(0, _LIST_SIZE)
    return tl.where(slot < count, float("-inf"), float("inf")), slot + (_NO_ID - _LIST_SIZE)


@triton.jit
def _take_in(values, ids, best, best_ids):
    """Inserts the largest of `values`. Equal values already in the list must have lower ids."""
    top = tl.max(values, 0)
    floor = tl.min(best, 0)
    while top > floor:
        taken = tl.min(tl.where(values == top, ids, _NO_ID), 0)
        # The last of equal values is replaced. Ids of empty slots differ, so one slot changes.
        last = tl.max(tl.where(best == floor, best_ids, -1), 0)
        leaves = (best == floor) & (best_ids == last)
        best = tl.where(leaves, top, best)
        best_ids = tl.where(leaves, taken, best_ids)
        values = tl.where(ids == taken, float("-inf"), values)
        top = tl.max(values, 0)
        floor = tl.min(best, 0)
    return best, best_ids


@triton.jit
def _add_exp(values, peak, total):
    """Adds to a sum of exponentials that is represented as total * exp(peak)."""
    top = tl.maximum(peak, tl.max(values, 0))
    shift = tl.where(top > float("-inf"), top, 0.0)
    return top, total * tl.exp(peak - shift) + tl.sum(tl.exp(values - shift), 0)


@triton.jit
def _ranks(best, best_ids, count):
    """Returns the rank of each list entry: by falling value, then by id."""
    value, other = best[:, None], best[None, :]
    first = (other > value) | ((other == value) & (best_ids[None, :] < best_ids[:, None]))
    first = first & (tl.arange(0, _LIST_SIZE) < count)[None, :]
    return tl.sum(first.to(tl.int32), 1)


@triton.jit(do_not_specialize=["count", "part_chunks", "num_parts"])
def _part_candidates_kernel(
    # [T, V], entries of a row side by side
    logits,
    row_stride,
    vocab,
    # [T, P, K] float32 and int32, best first; [T, P] float32
    part_values,
    part_ids,
    part_lse,
    count,
    part_chunks,
    num_parts,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = row * num_parts + part
    best, best_ids = _empty_list(count)
    peak = float("-inf")
    total = 0.0
    for chunk in range(part * part_chunks, (part + 1) * part_chunks):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=float("-inf"))
        values = values.to(tl.float32)
        # NaN is never a candidate.
        values = tl.where(values == values, values, float("-inf"))
        peak, total = _add_exp(values, peak, total)
        best, best_ids = _take_in(values, ids, best, best_ids)
    tl.store(part_lse + at, peak + tl.log(total))
    # Sorted: the merge relies on equal values being in order of their ids.
    slot = at * count + _ranks(best, best_ids, count)
    inside = tl.arange(0, _LIST_SIZE) < count
    tl.store(part_values + slot, best, mask=inside)
    tl.store(part_ids + slot, best_ids, mask=inside)


@triton.jit(do_not_specialize=["count", "num_parts"])
def _merge_candidates_kernel(
    # [T, P, K] float32 and int32; [T, P] float32
    part_values,
    part_ids,
    part_lse,
    # [T, K] int64 and float32
    ids_out,
    log_probs,
    count,
    num_parts,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best, best_ids = _empty_list(count)
    peak = float("-inf")
    total = 0.0
    num_slots = num_parts * count
    for first in range(0, num_slots, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        inside = slot < num_slots
        at = row * num_slots + slot
        values = tl.load(part_values + at, mask=inside, other=float("-inf"))
        ids = tl.load(part_ids + at, mask=inside, other=_NO_ID)
        best, best_ids = _take_in(values, ids, best, best_ids)
        # There are no more parts than slots.
        lse = tl.load(part_lse + row * num_parts + slot, mask=slot < num_parts, other=float("-inf"))
        peak, total = _add_exp(lse, peak, total)
    rank = _ranks(best, best_ids, count)
    inside = tl.arange(0, _LIST_SIZE) < count
    found = best > float("-inf")
    score = tl.where(found, best - (peak + tl.log(total)), float("-inf"))
    tl.store(ids_out + row * count + rank, tl.where(found, best_ids, 0).to(tl.int64), mask=inside)
    tl.store(log_probs + row * count + rank, score, mask=inside)


def top_candidates_triton(
    # [T, V] bfloat16, float16 or float32
    logits: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`local_tree.top_candidates` of up to MOST_CANDIDATES, no more than V; graph safe.

    As on the host, NaN and -inf are never candidates: a row with too few others ends with id 0 at
    -inf. All log-probabilities of a row with +inf are NaN.
    """
    rows, vocab = logits.shape
    assert 1 <= count <= min(vocab, MOST_CANDIDATES), (count, vocab)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.device
    ids = torch.empty((rows, count), dtype=torch.int64, device=device)
    log_probs = torch.empty((rows, count), dtype=torch.float32, device=device)
    if not rows:
        return ids, log_probs
    chunks = triton.cdiv(vocab, _CHUNK)
    part_chunks = triton.cdiv(chunks, min(chunks, triton.cdiv(_PROGRAMS, rows)))
    parts = triton.cdiv(chunks, part_chunks)
    part_values = torch.empty((rows, parts, count), dtype=torch.float32, device=device)
    part_ids = torch.empty((rows, parts, count), dtype=torch.int32, device=device)
    part_lse = torch.empty((rows, parts), dtype=torch.float32, device=device)
    # The stride of a single row is undefined.
    row_stride = logits.stride(0) if rows > 1 else vocab
    _part_candidates_kernel[(rows, parts)](
        logits, row_stride, vocab, part_values, part_ids, part_lse, count, part_chunks, parts,
        CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    _merge_candidates_kernel[(rows,)](
        part_values, part_ids, part_lse, ids, log_probs, count, parts, SLOTS=_SLOTS, num_warps=4
    )
    return ids, log_probs
