# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters that change logits: penalties, bad words, biases, budgets, grammars.

L rows of logits, V tokens of the vocabulary. Drafts are rows below each other: the tokens that
precede a row and are not committed are those of the rows above it in its own request.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from vllm_specplug.vllm_v2.cpu_kernels.launch import CpuKernel, Grid

Tensor = torch.Tensor

_INF = float("inf")


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """Bits [rows, count] of int32 words [rows, ceil(count / 32)], lowest first, as bool."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).flatten(1)[:, :count].bool()


def _drafted(input_ids: Tensor, row: int, local_pos: int) -> Tensor:
    """Tokens of the drafts above and at a row of logits."""
    return input_ids[row - local_pos + 1 : row + 1]


@CpuKernel
def penalties(
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    token_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    repetition_penalty_ptr: Tensor,
    frequency_penalty_ptr: Tensor,
    presence_penalty_ptr: Tensor,
    prompt_bin_mask_ptr: Tensor,
    output_bin_counts_ptr: Tensor,
    vocab_size: int,
) -> None:
    local_pos = expanded_local_pos_ptr.tolist()
    for i, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        repetition = repetition_penalty_ptr[slot]
        frequency, presence = frequency_penalty_ptr[slot], presence_penalty_ptr[slot]
        if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
            continue
        row, counts = logits_ptr[i, :vocab_size], output_bin_counts_ptr[slot]
        if local_pos[i]:
            drafted = _drafted(token_ids_ptr, i, local_pos[i]).long()
            counts = counts.index_add(0, drafted, torch.ones_like(drafted, dtype=torch.int32))
        seen = counts > 0
        if repetition != 1.0:
            prompt = unpack_bits(prompt_bin_mask_ptr[slot : slot + 1], vocab_size)[0]
            scale = torch.where(prompt | seen, repetition, 1.0)
            row *= torch.where(row > 0, 1.0 / scale, scale)
        row -= frequency * counts
        row -= presence * seen


@CpuKernel
def bincount(
    expanded_idx_mapping_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    prompt_len_ptr: Tensor,
    prefill_len_ptr: Tensor,
    prompt_bin_mask_ptr: Tensor,
    output_bin_counts_ptr: Tensor,
) -> None:
    masks, counts = prompt_bin_mask_ptr.numpy(), output_bin_counts_ptr.numpy()
    for slot in expanded_idx_mapping_ptr.tolist():
        prompt_len, prefill_len = int(prompt_len_ptr[slot]), int(prefill_len_ptr[slot])
        tokens = all_token_ids_ptr[slot].numpy()
        prompt = tokens[:prompt_len].astype(np.uint32)
        bits = np.uint32(1) << prompt % 32
        np.bitwise_or.at(masks[slot].view(np.uint32), prompt // 32, bits)
        np.add.at(counts[slot], tokens[prompt_len:prefill_len], 1)


@CpuKernel
def bad_words(
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    bad_word_token_ids_ptr: Tensor,
    bad_word_offsets_ptr: Tensor,
    num_bad_words_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    prompt_len_ptr: Tensor,
    total_len_ptr: Tensor,
    input_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
) -> None:
    local_pos = expanded_local_pos_ptr.tolist()
    for i, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        count = int(num_bad_words_ptr[slot])
        if not count:
            continue
        offsets = bad_word_offsets_ptr[slot, : count + 1].tolist()
        words = bad_word_token_ids_ptr[slot, : offsets[-1]].tolist()
        longest = max(end - start for start, end in pairwise(offsets))
        first, end = int(prompt_len_ptr[slot]), int(total_len_ptr[slot])
        # Only as much of the output as the longest word can match.
        output = all_token_ids_ptr[slot, max(first, end - longest) : end].tolist()
        output += _drafted(input_ids_ptr, i, local_pos[i]).tolist()
        for start, stop in pairwise(offsets):
            prefix = words[start : stop - 1]
            if output[len(output) - len(prefix) :] == prefix and len(prefix) <= len(output):
                logits_ptr[i, words[stop - 1]] = -_INF


@CpuKernel
def bias(
    logits_ptr: Tensor,
    vocab_size: int,
    expanded_idx_mapping_ptr: Tensor,
    num_allowed_token_ids_ptr: Tensor,
    allowed_token_ids_ptr: Tensor,
    num_logit_bias_ptr: Tensor,
    bias_token_ids_ptr: Tensor,
    bias_ptr: Tensor,
    pos_ptr: Tensor,
    min_lens_ptr: Tensor,
    num_stop_token_ids_ptr: Tensor,
    restore_when_all_masked_ptr: Tensor,
    stop_token_ids_ptr: Tensor,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    positions = pos_ptr.tolist()
    for i, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        row = logits_ptr[i, :vocab_size]
        num_allowed = int(num_allowed_token_ids_ptr[slot])
        if num_allowed:
            allowed = allowed_token_ids_ptr[slot, :num_allowed].long()
            kept = row[allowed]
            row.fill_(-_INF)
            row[allowed] = kept
        num_bias = int(num_logit_bias_ptr[slot])
        if num_bias:
            row[bias_token_ids_ptr[slot, :num_bias].long()] += bias_ptr[slot, :num_bias]
        num_stop = int(num_stop_token_ids_ptr[slot])
        if num_stop and positions[i] + 1 < int(min_lens_ptr[slot]):
            stop = stop_token_ids_ptr[slot, :num_stop].long()
            masked = row[stop]
            row[stop] = -_INF
            restores = CHECK_ALL_MASKED_ROWS and bool(restore_when_all_masked_ptr[slot])
            if restores and row.max() == -_INF:
                row[stop] = torch.where(masked.isfinite(), masked, row[stop])


def _last_match(tokens: list[int], pattern: list[int], first: int, last: int) -> int:
    """Where `pattern` begins for the last time in tokens, the first of which is number `first`; or
    `last`."""
    for i in range(len(tokens) - len(pattern), -1, -1):
        if tokens[i : i + len(pattern)] == pattern:
            return first + i
    return last


@CpuKernel
def update_committed_marker_cache(
    req_ids_ptr: Tensor,
    thinking_token_budget_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    total_len_ptr: Tensor,
    cached_last_start_ptr: Tensor,
    cached_last_end_ptr: Tensor,
    cached_scan_pos_ptr: Tensor,
    reasoning_start_token_ids_ptr: Tensor,
    natural_reasoning_end_token_ids_ptr: Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
) -> None:
    """A scan from the beginning finds both markers' last places; the kernel stops at the first
    block that has one of them, whose order is the same."""
    for slot in req_ids_ptr.tolist():
        if thinking_token_budget_ptr[slot] < 0:
            continue
        total, scanned = int(total_len_ptr[slot]), int(cached_scan_pos_ptr[slot])
        restart = scanned > total
        low = 0 if restart else scanned
        tokens = all_token_ids_ptr[slot, low:total].tolist()
        for cache, markers in (
            (cached_last_start_ptr, reasoning_start_token_ids_ptr),
            (cached_last_end_ptr, natural_reasoning_end_token_ids_ptr),
        ):
            known = -1 if restart else int(cache[slot])
            cache[slot] = _last_match(tokens, markers.tolist(), low, known)
        cached_scan_pos_ptr[slot] = max(total - (MAX_LEN - 1), 0)


@CpuKernel
def thinking_budget(
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    thinking_token_budget_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    total_len_ptr: Tensor,
    input_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    cached_last_start_ptr: Tensor,
    cached_last_end_ptr: Tensor,
    reasoning_start_token_ids_ptr: Tensor,
    natural_reasoning_end_token_ids_ptr: Tensor,
    reasoning_end_token_ids_ptr: Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
) -> None:
    start_ids = reasoning_start_token_ids_ptr.tolist()
    natural_end_ids = natural_reasoning_end_token_ids_ptr.tolist()
    end_ids = reasoning_end_token_ids_ptr.tolist()
    longest = max(START_LEN, NATURAL_END_LEN, END_LEN)
    local_pos = expanded_local_pos_ptr.tolist()
    for i, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        budget = int(thinking_token_budget_ptr[slot])
        if budget < 0:
            continue
        total = int(total_len_ptr[slot])
        low = max(total - longest + 1, 0)
        # Markers that end before the drafts are in the caches.
        tokens = all_token_ids_ptr[slot, low:total].tolist()
        tokens += _drafted(input_ids_ptr, i, local_pos[i]).tolist()
        started = _last_match(tokens, start_ids, low, int(cached_last_start_ptr[slot]))
        ended = _last_match(tokens, natural_end_ids, low, int(cached_last_end_ptr[slot]))
        effective_len = total + local_pos[i]
        if started < 0 or started <= ended or effective_len - started - START_LEN < budget:
            continue
        # The marker that is forced may have begun already.
        begun = 0
        for length in range(1, min(END_LEN - 1, len(tokens)) + 1):
            if tokens[len(tokens) - length :] == end_ids[:length]:
                begun = length
        logits_ptr[i, end_ids[begun]] = 1.0e9


@CpuKernel
def apply_grammar_bitmask(
    grid: Grid,
    logits_ptr: Tensor,
    logits_indices_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    bitmask_ptr: Tensor,
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    mapping = logits_indices_ptr.numpy()[: grid[0]]
    cu_num_logits = cu_num_logits_ptr.numpy()
    requests, positions = mapping // MASK_STRIDE, mapping % MASK_STRIDE
    rows = cu_num_logits[requests] + positions
    used = np.flatnonzero(rows < cu_num_logits[requests + 1])
    masks = bitmask_ptr[torch.from_numpy(used)]
    for row, allowed in zip(rows[used].tolist(), unpack_bits(masks, vocab_size), strict=True):
        logits_ptr[row, :vocab_size].masked_fill_(~allowed, -_INF)
