# SPDX-License-Identifier: Apache-2.0
"""Recurrent states that prefix caching keeps at the ends of blocks.

The running state is in the block of a step's last row. It moves there before the forward, and the
blocks it leaves keep what they hold. vLLM's own kernels for it are Triton's, and count states of
drafts; of those there are none (`vllm_attention.state_rows`).

Seam: state_blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec


def move_states_by_block(model_state: Any, layers: Mapping[str, Any]) -> None:
    """Gives V2's model state of a hybrid target these copies in the place of its own, on a CPU.

    Args:
        layers: vLLM's static forward context.
    """
    model_state.preprocess_state = partial(_enter_blocks, model_state, layers)
    stock = model_state.postprocess_state

    def postprocess_state(idx_mapping: Any, num_sampled: Any, *computed: Any) -> None:
        # Without the third argument it copies nothing.
        stock(idx_mapping, num_sampled)

    model_state.postprocess_state = postprocess_state


def keep_states_as_committed(model_state: Any) -> None:
    """Has V2's model state of a hybrid target move states with its own kernels, on a device.

    They find one state per sequence: what a step accepted is in it, as if it were one token.
    """
    stock = model_state.postprocess_state

    def postprocess_state(idx_mapping: Any, num_sampled: Any, *computed: Any) -> None:
        stock(idx_mapping, 1)

    model_state.postprocess_state = postprocess_state


def _enter_blocks(
    model_state: Any,
    layers: Mapping[str, Any],
    input_batch: Any,
    # by KV cache group, [>= B, blocks]
    block_tables: tuple[torch.Tensor, ...],
    kv_cache_config: Any,
    # [S] by request slot
    num_computed_tokens: torch.Tensor,
) -> None:
    """`ModelState.preprocess_state`."""
    count = input_batch.num_reqs
    groups = [
        (table[:count], group)
        for table, group in zip(block_tables, kv_cache_config.kv_cache_groups, strict=True)
        if isinstance(group.kv_cache_spec, MambaSpec)
    ]
    size = groups[0][1].kv_cache_spec.block_size
    slots = input_batch.idx_mapping[:count].long()
    ends = num_computed_tokens[slots] + input_batch.query_start_loc[: count + 1].diff()
    blocks = model_state._mamba_state_idx_gpu
    left, entered = blocks[slots].long(), (ends - 1).long() // size
    blocks[slots] = entered.to(blocks.dtype)
    moved = ((left >= 0) & (left != entered)).nonzero()[:, 0]
    if not len(moved):
        return
    for table, group in groups:
        source, target = (table[moved, at[moved]].long() for at in (left, entered))
        for name in group.layer_names:
            for state in layers[name].kv_cache:
                state[target] = state[source]
