# SPDX-License-Identifier: Apache-2.0
"""Preparing a step's inputs and updating the requests after it.

Letters as in vLLM: B requests of the batch, slots index persistent request state.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from vllm_specplug.vllm_v2.cpu_kernels.launch import CpuKernel, Grid, array_at

Tensor = torch.Tensor


def _flat(tensor: Tensor) -> Any:
    """Returns a contiguous tensor as a flat array over the same memory."""
    return tensor.view(-1).numpy()


def _spread(values: Any, counts: Any) -> Any:
    """Returns each values[i] counts[i] times, plus 0, 1, ... within each."""
    starts = np.cumsum(counts) - counts
    return np.repeat(values - starts, counts) + np.arange(int(counts.sum()))


@CpuKernel
def prepare_prefill_inputs(
    input_ids_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    num_lookahead: int,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    prefill_lens_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
) -> None:
    slots = idx_mapping_ptr.numpy()
    prefill_lens = prefill_lens_ptr.numpy()[slots]
    computed = num_computed_tokens_ptr.numpy()[slots]
    starts = query_start_loc_ptr.numpy()
    input_ids, tokens = input_ids_ptr.numpy(), all_token_ids_ptr.numpy()
    lookahead = next_prefill_tokens_ptr.numpy()
    for i in np.flatnonzero(computed < prefill_lens):
        slot, start, end = slots[i], starts[i], starts[i + 1]
        stop = computed[i] + end - start
        input_ids[start:end] = tokens[slot, computed[i] : stop]
        following = tokens[slot, stop : min(stop + num_lookahead, prefill_lens[i])]
        lookahead[:, slot] = 0
        lookahead[: len(following), slot] = following


@CpuKernel
def prepare_pos_seq_lens(
    grid: Grid,
    pos_ptr: Tensor,
    seq_lens_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    max_num_reqs: int,
) -> None:
    num_reqs = grid[0] - 1
    computed = num_computed_tokens_ptr.numpy()[idx_mapping_ptr.numpy()]
    query_lens = np.diff(query_start_loc_ptr.numpy()[: num_reqs + 1])
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[:num_reqs] = computed + query_lens
    seq_lens[num_reqs:max_num_reqs] = 0
    positions = _spread(computed, query_lens)
    pos_ptr.numpy()[: len(positions)] = positions


@CpuKernel
def prepare_rope_positions(
    positions_ptr: Tensor,
    prefill_positions_ptr: Tensor,
    prefill_positions_stride0: int,
    prefill_positions_stride1: int,
    prefill_delta_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    prefill_lens_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    NUM_DIMS: int,
) -> None:
    slots = idx_mapping_ptr.numpy()
    computed = num_computed_tokens_ptr.numpy()[slots]
    is_prefill = computed < prefill_lens_ptr.numpy()[slots]
    first = computed + prefill_delta_ptr.numpy()[slots]
    starts, positions = query_start_loc_ptr.numpy(), positions_ptr.numpy()
    given = _flat(prefill_positions_ptr)
    for i, slot in enumerate(slots.tolist()):
        start, end = starts[i], starts[i + 1]
        for axis in range(NUM_DIMS):
            if is_prefill[i]:
                row = slot * prefill_positions_stride0 + axis * prefill_positions_stride1
                row += computed[i]
                values = given[row : row + end - start]
            else:
                values = np.arange(first[i], first[i] + end - start)
            positions[axis, start : start + len(values)] = values


@CpuKernel
def combine_sampled_and_draft_tokens(
    input_ids_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    prefill_len_ptr: Tensor,
    draft_tokens_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    logits_indices_ptr: Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    slots = idx_mapping_ptr.numpy()
    num_reqs = len(slots)
    num_logits = np.diff(cu_num_logits_ptr.numpy()[: num_reqs + 1])
    query_ends = query_start_loc_ptr.numpy()[1 : num_reqs + 1]
    indices = _spread(query_ends - num_logits, num_logits)
    logits_indices_ptr.numpy()[: len(indices)] = indices

    seq_lens, prefill_lens = seq_lens_ptr.numpy()[:num_reqs], prefill_len_ptr.numpy()[slots]
    generating = seq_lens > prefill_lens
    input_ids = input_ids_ptr.numpy()
    if NUM_NEW_SAMPLED_TOKENS > 0:
        # Logits rows that start inside the prompt keep its tokens.
        follows = generating & (seq_lens - num_logits >= prefill_lens)
        last = _flat(last_sampled_tokens_ptr)[slots[follows]]
        input_ids[(query_ends - num_logits)[follows]] = last
    num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
    drafts = draft_tokens_ptr.numpy()
    for i in np.flatnonzero(generating & (num_drafts > 0)):
        end, count = query_ends[i], num_drafts[i]
        input_ids[end - count : end] = drafts[slots[i], :count]


@CpuKernel
def get_num_sampled_and_rejected(
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    seq_lens_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    prefill_len_ptr: Tensor,
) -> None:
    slots = idx_mapping_ptr.numpy()
    num_reqs = len(slots)
    inside_prompt = seq_lens_ptr.numpy()[:num_reqs] < prefill_len_ptr.numpy()[slots]
    num_sampled = num_sampled_ptr.numpy()[:num_reqs]
    num_sampled[inside_prompt] = 0
    rejected = np.diff(cu_num_logits_ptr.numpy()[: num_reqs + 1]) - num_sampled
    rejected[inside_prompt] = 0
    num_rejected_ptr.numpy()[:num_reqs] = rejected


@CpuKernel
def post_update(
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    output_bin_counts_ptr: Tensor | None,
    sampled_tokens_ptr: Tensor,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    query_start_loc_ptr: Tensor | None,
    all_token_ids_ptr: Tensor,
    total_len_ptr: Tensor,
    draft_tokens_ptr: Tensor | None = None,
    draft_tokens_out_ptr: Tensor | None = None,
    num_draft_tokens: int = 0,
) -> None:
    computed, total_lens = num_computed_tokens_ptr.numpy(), total_len_ptr.numpy()
    last, tokens = _flat(last_sampled_tokens_ptr), all_token_ids_ptr.numpy()
    sampled, num_sampled = sampled_tokens_ptr.numpy(), num_sampled_ptr.numpy()
    counts = None if output_bin_counts_ptr is None else output_bin_counts_ptr.numpy()
    starts = None if query_start_loc_ptr is None else query_start_loc_ptr.numpy()
    num_rejected = num_rejected_ptr.numpy()
    for i, slot in enumerate(idx_mapping_ptr.tolist()):
        if slot < 0:
            continue
        if draft_tokens_ptr is not None and draft_tokens_out_ptr is not None:
            draft_tokens_out_ptr[slot] = draft_tokens_ptr[i]
        num_new = num_sampled[i]
        if num_new > 0:
            new, total = sampled[i, :num_new], total_lens[slot]
            tokens[slot, total : total + num_new] = new
            last[slot] = new[-1]
            total_lens[slot] = total + num_new
            if counts is not None:
                np.add.at(counts[slot], new, 1)
        query_len = 0 if starts is None else starts[i + 1] - starts[i]
        computed[slot] += query_len - num_rejected[i]


@CpuKernel
def post_update_num_computed_tokens(
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
) -> None:
    slots = idx_mapping_ptr.numpy()
    query_lens = np.diff(query_start_loc_ptr.numpy()[: len(slots) + 1])
    num_computed_tokens_ptr.numpy()[slots] += query_lens


@CpuKernel
def expand_idx_mapping(
    idx_mapping_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
) -> None:
    slots = idx_mapping_ptr.numpy()
    num_logits = np.diff(cu_num_logits_ptr.numpy()[: len(slots) + 1])
    total = int(num_logits.sum())
    expanded_idx_mapping_ptr.numpy()[:total] = np.repeat(slots, num_logits)
    expanded_local_pos_ptr.numpy()[:total] = _spread(np.zeros_like(num_logits), num_logits)


@CpuKernel
def gather_block_tables(
    grid: Grid,
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    num_blocks_ptr: Tensor,
    num_reqs: int,
    num_computed_tokens_ptr: Tensor | None = None,
    sliding_window_reach_ptr: Tensor | None = None,
    block_sizes_ptr: Tensor | None = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    num_groups, num_padded = grid
    slots, num_blocks = batch_idx_to_req_idx.tolist(), num_blocks_ptr.numpy()
    num_slots = num_blocks.shape[1]
    for group in range(num_groups):
        width = int(block_table_strides[group])
        source = array_at(int(src_block_table_ptrs[group]), num_slots, width)
        target = array_at(int(dst_block_table_ptrs[group]), num_padded, width)
        for i, slot in enumerate(slots[:num_reqs]):
            count = num_blocks[group, slot]
            target[i, :count] = source[slot, :count]
            if MASK_SLIDING_WINDOW and (reach := int(sliding_window_reach_ptr[group])) > 0:  # type: ignore[index]
                # Blocks that no query of this step reads may belong to another request.
                below = int(num_computed_tokens_ptr[slot]) - reach  # type: ignore[index]
                target[i, : min(count, max(below, 0) // int(block_sizes_ptr[group]))] = 0  # type: ignore[index]
        target[num_reqs:] = 0


@CpuKernel
def compute_slot_mappings(
    grid: Grid,
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings_ptr: Tensor,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
) -> None:
    assert CP_SIZE == 1, "CPUs have no context parallelism"
    num_groups, num_reqs = grid[0], grid[1] - 1
    starts = query_start_loc.numpy()[: num_reqs + 1]
    num_tokens = int(starts[-1])
    slots = np.repeat(idx_mapping.numpy(), np.diff(starts))
    real = slots >= 0
    slots, positions = slots[real], pos.numpy()[:num_tokens][real]
    for group in range(num_groups):
        mapping = slot_mappings_ptr.numpy()[group, :max_num_tokens]
        mapping[:] = PAD_ID
        if not slot_mapping_enabled[group] or not len(slots):
            continue
        width, block_size = int(block_table_strides[group]), int(block_sizes[group])
        table = array_at(int(block_table_ptrs[group]), int(slots.max()) + 1, width)
        blocks = table[slots, positions // block_size].astype(np.int64)
        mapping[:num_tokens][real] = blocks * block_size + positions % block_size


@CpuKernel
def apply_write(
    output_ptr: Tensor,
    output_stride: int | Tensor,
    write_indices_ptr: Tensor,
    write_starts_ptr: Tensor,
    write_contents_ptr: Tensor,
    write_cu_lens_ptr: Tensor,
    write_group_ids_ptr: Tensor | None,
    MULTI_GROUP: bool,
) -> None:
    contents, begin = write_contents_ptr.numpy(), 0
    rows, starts, ends = (
        p.tolist() for p in (write_indices_ptr, write_starts_ptr, write_cu_lens_ptr)
    )
    for i, (row, start, end) in enumerate(zip(rows, starts, ends, strict=True)):
        if MULTI_GROUP:
            assert write_group_ids_ptr is not None and isinstance(output_stride, torch.Tensor)
            group = int(write_group_ids_ptr[i])
            width = int(output_stride[group])
            target = array_at(int(output_ptr[group]), row + 1, width)[row]
        else:
            # A tensor of one dimension has rows of one element.
            target = output_ptr.numpy().reshape(len(output_ptr), -1)[row]
        target[start : start + end - begin] = contents[begin:end]
        begin = end


@CpuKernel
def apply_prompt_embeds(
    inputs_embeds_ptr: Tensor,
    embeds_ptrs_ptr: Tensor,
    mask_ptrs_ptr: Tensor,
    embeds_lens_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    hidden_size: int,
) -> None:
    starts, width = query_start_loc_ptr.tolist(), inputs_embeds_ptr.element_size()
    for i, slot in enumerate(idx_mapping_ptr.tolist()):
        computed = int(num_computed_tokens_ptr[slot])
        rows = min(starts[i + 1] - starts[i], int(embeds_lens_ptr[slot]) - computed)
        source, mask = int(embeds_ptrs_ptr[slot]), int(mask_ptrs_ptr[slot])
        for row in range(rows):
            if mask and ctypes.c_int8.from_address(mask + computed + row).value:
                # The prompt has a token here.
                continue
            ctypes.memmove(
                inputs_embeds_ptr[starts[i] + row].data_ptr(),
                source + (computed + row) * hidden_size * width,
                hidden_size * width,
            )


@CpuKernel
def scatter_num_accepted(
    grid: Grid, idx_mapping_ptr: Tensor, num_sampled_ptr: Tensor, num_accepted_ptr: Tensor
) -> None:
    slots = idx_mapping_ptr[: grid[0]].long()
    known = slots >= 0
    num_accepted_ptr[slots[known]] = num_sampled_ptr[: grid[0]][known].clamp_min(1)


@CpuKernel
def fill_num_accepted(
    grid: Grid, idx_mapping_ptr: Tensor, num_accepted_ptr: Tensor, num_sampled: int
) -> None:
    slots = idx_mapping_ptr[: grid[0]].long()
    num_accepted_ptr[slots[slots >= 0]] = num_sampled


@CpuKernel
def zero_kv_blocks(
    seg_addrs_ptr: Tensor,
    seg_block_strides_ptr: Tensor,
    seg_page_sizes_ptr: Tensor,
    block_ids_ptr: Tensor,
) -> None:
    # Strides and sizes count words of four bytes.
    segments = zip(
        seg_addrs_ptr.tolist(),
        seg_block_strides_ptr.tolist(),
        seg_page_sizes_ptr.tolist(),
        strict=True,
    )
    blocks = block_ids_ptr.tolist()
    for address, stride, size in segments:
        for block in blocks:
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)
