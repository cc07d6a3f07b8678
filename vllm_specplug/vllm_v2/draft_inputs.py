# SPDX-License-Identifier: Apache-2.0
"""Inputs of a draft on the device: a step's results, within the limits that the host sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_specplug.tree import step_trees


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of a draft for R requests, see `DeviceRequests`; int32 [R] except the anchors."""

    # [R] int64
    anchors: torch.Tensor
    context_lens: torch.Tensor
    budgets: torch.Tensor
    depths: torch.Tensor
    forward_depths: torch.Tensor
    """Levels of the draft forward, at most the tree's depth."""
    lengths: torch.Tensor
    """Tokens that a lookup searches; 0 for a request without a budget."""
    roots: torch.Tensor
    """Position of the next root; -1 while the prompt is incomplete."""


def draft_inputs(
    req_states: Any,
    # [R] int64
    slots: torch.Tensor,
    # [R] int32
    num_sampled: torch.Tensor,
    # [4, R] int32
    limits: torch.Tensor,
) -> DraftInputs:
    """Returns the inputs of the next draft. Does not synchronise with the host.

    Call it once vLLM has updated its request states.

    Args:
        limits: the host's limits for each request: nodes, total tokens, nodes that the next step
            has rows for, and levels of the draft forward.
    """
    lengths, last_sampled = req_states.total_len.gpu, req_states.last_sampled_tokens
    if step_trees.has_kernels(slots.device):
        from vllm_specplug.kernels.step_tables_triton import draft_inputs_triton

        return DraftInputs(*draft_inputs_triton(slots, lengths, num_sampled, last_sampled, limits))
    most, longest, _, forward = limits
    totals = lengths[slots]
    is_decoding = num_sampled > 0
    # The next step always emits one token besides the accepted drafts.
    depths = torch.minimum(longest - totals - 1, most)
    budgets = torch.where(is_decoding & (depths > 0), most, 0)
    return DraftInputs(
        anchors=last_sampled[slots, 0],
        context_lens=totals - 1,
        budgets=budgets,
        depths=depths,
        forward_depths=torch.minimum(depths, forward),
        lengths=torch.where(budgets > 0, totals, 0),
        roots=torch.where(is_decoding, totals - 1, -1),
    )


def warm_up(req_states: Any) -> None:
    """Compiles the kernel that `draft_inputs` launches."""
    slots = torch.zeros(1, dtype=torch.int64, device=req_states.last_sampled_tokens.device)
    one = slots.int()
    draft_inputs(req_states, slots, one, one.expand(4, 1).contiguous())
