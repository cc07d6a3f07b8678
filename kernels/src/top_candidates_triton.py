# SPDX-License-Identifier: Apache-2.0
"""The likeliest tokens of rows of logits on the device, in one read of them in their own dtype.

Two launches. A program of the first reads a part of a row in chunks: an entry that beats the worst
of the list kept so far takes its place, so that after the first chunk few do. The second merges
the parts' lists, one program per row. A list is as long as a warp is wide, whatever the count: its
reductions need no barrier, and no count makes a variant of its own. Between the launches lie
8 bytes per part and candidate and 4 per part: 163 KB for 480 rows, 151,936 tokens and 8 candidates.
Short batches are cut into more parts: 15 rows still make four programs per multiprocessor of an
H100.

Letters: T rows, V vocabulary, P parts of a row, K candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cuda_contract import MOST_CANDIDATES

# Entries of a chunk, and entries of the parts' lists that the merge takes at once.
_CHUNK = 4096
_SLOTS = 1024
# Programs that keep a large device busy: three waves of five on each of 132 multiprocessors.
_PROGRAMS = 2048
_PLACES = tl.constexpr(MOST_CANDIDATES)
# Above every token id, with the ids of empty places just below it.
_NO_ID = tl.constexpr((1 << 31) - 1)


@triton.jit
def _empty_list(count):
    """Values and ids of a list of `count` places; the other places never lose theirs."""
    place = tl.arange(0, _PLACES)
    return tl.where(place < count, float("-inf"), float("inf")), place + (_NO_ID - _PLACES)


@triton.jit
def _take_in(values, ids, best, best_ids):
    """Takes the largest of `values` into the list, in which equal ones must have lower ids."""
    top = tl.max(values, 0)
    floor = tl.min(best, 0)
    while top > floor:
        taken = tl.min(tl.where(values == top, ids, _NO_ID), 0)
        # Of equal ones the last goes. Ids of empty places differ, so that one place is left.
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
    """Adds to a sum of exponentials, kept as `total` times e to the `peak`."""
    top = tl.maximum(peak, tl.max(values, 0))
    shift = tl.where(top > float("-inf"), top, 0.0)
    return top, total * tl.exp(peak - shift) + tl.sum(tl.exp(values - shift), 0)


@triton.jit
def _ranks(best, best_ids, count):
    """Where each entry of the list stands, best first and equal ones by id."""
    value, other = best[:, None], best[None, :]
    first = (other > value) | ((other == value) & (best_ids[None, :] < best_ids[:, None]))
    first = first & (tl.arange(0, _PLACES) < count)[None, :]
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
    # Sorted, as the merge takes earlier slots to have the lower ids of equal values.
    slot = at * count + _ranks(best, best_ids, count)
    inside = tl.arange(0, _PLACES) < count
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
    inside = tl.arange(0, _PLACES) < count
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

    As in the compiled one of the host, NaN and -inf are never candidates: a row with too few
    others ends with id 0 at -inf. All log-probabilities of a row with +inf are NaN.
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
    # The stride of a single row is whatever made it.
    row_stride = logits.stride(0) if rows > 1 else vocab
    _part_candidates_kernel[(rows, parts)](
        logits, row_stride, vocab, part_values, part_ids, part_lse, count, part_chunks, parts,
        CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    _merge_candidates_kernel[(rows,)](
        part_values, part_ids, part_lse, ids, log_probs, count, parts, SLOTS=_SLOTS, num_warps=4
    )
    return ids, log_probs
