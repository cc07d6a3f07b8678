# SPDX-License-Identifier: Apache-2.0
"""Sampling rows of logits and scoring what was sampled.

L rows of logits, V tokens of the vocabulary. vLLM keys a row's noise by (seed, position, token), so
a token is sampled alike wherever and in whatever batch its row is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_specplug.kernels import gumbel_argmax, row_argmax
from vllm_specplug.kernels.gumbel_argmax import UNDECIDED
from vllm_specplug.vllm_v2.cpu_kernels.launch import CpuKernel, Grid

Tensor = torch.Tensor

_HIGH_DOMAIN = 0x9E3779B9
_U32 = 0xFFFFFFFF


def _mix(state: Any, key: Any) -> Any:
    """One round of MurmurHash3 on uint32 arrays."""
    key = key * np.uint32(0xCC9E2D51)
    key = (key << 15 | key >> 17) * np.uint32(0x1B873593)
    state = state ^ key
    return (state << 13 | state >> 19) * np.uint32(5) + np.uint32(0xE6546B64)


def _hash(seed: int, pos: int, tokens: NDArray[np.uint32], domain: int = 0) -> NDArray[np.uint32]:
    """MurmurHash3 of (seed, position, token), 32 bits per token."""
    state = np.array([domain], dtype=np.uint32)
    for word in (seed, seed >> 32, pos):
        state = _mix(state, np.array([word & _U32], dtype=np.uint32))
    h = _mix(state, tokens) ^ np.uint32(16)
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> 16
    return h


def _noise32(seed: int, pos: int, tokens: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Gumbel noise [n] of tokens, operation by operation as vLLM's kernel computes it."""
    h = _hash(seed, pos, tokens)
    high, low = (h >> 16).astype(np.float32), (h & 0xFFFF).astype(np.float32)
    u = high * np.float32(1.52587890625e-05)
    u += (low + np.float32(0.5)) * np.float32(2.3283064365386963e-10)
    # log(1 - u): a series where u is small, which decides the winner, the logarithm elsewhere.
    series = np.full_like(u, 1 / 8)
    for divisor in (7, 6, 5, 4, 3, 2, 1):
        series = np.float32(1 / divisor) + u * series
    series = -u * series
    direct = np.log(np.maximum(np.float32(1) - u, np.float32(5.960464477539063e-08)))
    return -np.log(-np.where(u < np.float32(0.25), series, direct))


def _noise64(seed: int, pos: int, tokens: NDArray[np.uint32]) -> NDArray[np.float64]:
    low = _hash(seed, pos, tokens).astype(np.uint64)
    high = _hash(seed, pos, tokens, _HIGH_DOMAIN).astype(np.uint64)
    u = ((high << np.uint64(32) | low) >> np.uint64(11)).astype(np.float64)
    u = (u + 0.5) * 1.1102230246251565e-16
    return -np.log(-np.log(np.where(u == 1.0, u - 1.1102230246251565e-16, u)))


@CpuKernel
def gumbel_sample(
    local_argmax_ptr: Tensor,
    local_max_ptr: Tensor,
    logits_cache_ptr: Tensor | None,
    logits_cache_col_ptr: Tensor | None,
    logits_cache_source_ptr: Tensor | None,
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    seeds_ptr: Tensor,
    pos_ptr: Tensor,
    temp_ptr: Tensor,
    vocab_size: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """The winner of a row goes to its first block; vLLM then takes the best of all blocks."""
    assert logits_cache_ptr is None and not IS_DRAFTING, "only vLLM's own drafters sample like this"
    slots, logits = expanded_idx_mapping_ptr.long(), logits_ptr[:, :vocab_size]
    temperature = torch.where(slots >= 0, temp_ptr[slots], 0.0)
    # The first block wins ties; no other has a winner.
    local_argmax_ptr.zero_()
    local_max_ptr.fill_(float("-inf"))
    drawn = row_argmax(logits)
    if temperature.any():
        # A row of temperature 0 is left out.
        divisors = temperature if APPLY_TEMPERATURE else (temperature != 0).float()
        _draw(logits.float(), divisors, seeds_ptr[slots], pos_ptr.long(), USE_FP64, drawn)
    local_argmax_ptr[:, 0] = drawn


def _draw(
    # [L, V] float32
    logits: Tensor,
    # [L] float32; 0 for rows that keep their token
    divisors: Tensor,
    # [L] int64
    seeds: Tensor,
    # [L] int64
    positions: Tensor,
    use_fp64: bool,
    # [L] int64
    drawn: Tensor,
) -> None:
    """Puts sampled tokens into `drawn`."""
    if use_fp64:
        drawn.masked_fill_(divisors != 0, UNDECIDED)
    else:
        gumbel_argmax(logits, divisors, seeds, positions, drawn)
    tokens = np.arange(logits.shape[1], dtype=np.uint32)
    noise = _noise64 if use_fp64 else _noise32
    for i in np.flatnonzero(drawn.numpy() == UNDECIDED):
        row: Any = logits[i].numpy() / np.float32(divisors[i])
        row = row + noise(int(seeds[i]), int(positions[i]), tokens)
        drawn[i] = int(row.argmax())


@CpuKernel
def temperature(
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    temperature_ptr: Tensor,
    vocab_size: int,
) -> None:
    divisors = temperature_ptr[expanded_idx_mapping_ptr.long()]
    divisors = torch.where(divisors == 0.0, 1.0, divisors)
    logits_ptr.div_(divisors[:, None])


@CpuKernel
def min_p(
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    min_p_ptr: Tensor,
    vocab_size: int,
) -> None:
    shares = min_p_ptr[expanded_idx_mapping_ptr.long()].numpy()
    for i in np.flatnonzero(shares):
        row = logits_ptr[i]
        threshold = float(row.max().float().numpy() + np.log(shares[i]))
        row.masked_fill_(row < threshold, float("-inf"))


@CpuKernel
def topk_log_softmax(
    output_ptr: Tensor,
    logits_ptr: Tensor,
    topk_ids_ptr: Tensor,
    topk: int,
    vocab_size: int,
) -> None:
    logits = logits_ptr[:, :vocab_size].float()
    chosen = logits.gather(-1, topk_ids_ptr)
    torch.sub(chosen, logits.logsumexp(dim=-1, keepdim=True), out=output_ptr)


@CpuKernel
def ranks(
    output_ptr: Tensor,
    logits_ptr: Tensor,
    token_ids_ptr: Tensor,
    vocab_size: int,
) -> None:
    logits = logits_ptr[:, :vocab_size]
    chosen = logits.gather(-1, token_ids_ptr.long()[:, None])
    output_ptr.copy_((logits >= chosen).sum(dim=-1))


@CpuKernel
def fill_logprob_token_ids(
    out_token_ids_ptr: Tensor,
    out_valid_mask_ptr: Tensor,
    sampled_token_ids_ptr: Tensor,
    topk_indices_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    num_per_req_token_ids_ptr: Tensor,
    per_req_token_ids_ptr: Tensor,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    out_token_ids_ptr[:, 0] = sampled_token_ids_ptr
    out_valid_mask_ptr[:, 0] = True
    slots = expanded_idx_mapping_ptr.tolist()
    for i, slot in enumerate(slots):
        custom = int(num_per_req_token_ids_ptr[slot])
        count = custom or NUM_TOPK
        if count:
            source = per_req_token_ids_ptr[slot] if custom else topk_indices_ptr[i]
            out_token_ids_ptr[i, 1 : 1 + count] = source[:count]
            out_valid_mask_ptr[i, 1 : 1 + count] = True


@CpuKernel
def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
) -> None:
    starts, tokens = query_start_loc_ptr.tolist(), all_token_ids_ptr.view(-1)
    for i, slot in enumerate(idx_mapping_ptr.tolist()):
        start, end = starts[i], starts[i + 1]
        # A last row's token may lie past the request's last one, in memory that nobody reads.
        first = slot * all_token_ids_stride + int(num_computed_tokens_ptr[slot]) + 1
        targets = tokens[first : first + end - start]
        prompt_logprobs_token_ids_ptr[start : start + len(targets)] = targets


@CpuKernel
def num_nans(
    logits_ptr: Tensor,
    num_nans_ptr: Tensor,
    vocab_size: int,
) -> None:
    num_nans_ptr.copy_(logits_ptr[:, :vocab_size].isnan().sum(dim=-1))


@CpuKernel
def compact_sampling_mask(
    grid: Grid,
    logits_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    num_sampled_tokens_ptr: Tensor,
    token_ids_ptr: Tensor,
    packed_mask_ptr: Tensor,
    counts_ptr: Tensor,
    vocab_size: int,
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
) -> None:
    starts, sampled = cu_num_logits_ptr.tolist(), num_sampled_tokens_ptr.tolist()
    for row in range(grid[0]):
        request, offset = divmod(row, ROWS_PER_REQUEST)
        counts_ptr[row] = 0
        if offset >= sampled[request]:
            continue
        kept = logits_ptr[starts[request] + offset, :vocab_size].isfinite()
        tokens = kept.nonzero()[:max_num_kept, 0]
        token_ids_ptr[row, : len(tokens)] = tokens.to(token_ids_ptr.dtype)
        bits = np.packbits(kept.numpy(), bitorder="little")
        packed_mask_ptr[row, : len(bits)] = torch.from_numpy(bits)
        counts_ptr[row] = kept.sum()
