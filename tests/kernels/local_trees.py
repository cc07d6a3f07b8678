# SPDX-License-Identifier: Apache-2.0
"""Builders of local-head trees over every kind of head, and candidates for them."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.kernels import top_candidates
from vllm_specplug.methods.local.head import ConfidenceHead, LocalHead, LocalHeadConfig
from vllm_specplug.methods.local.settings import LocalTreeSettings
from vllm_specplug.methods.local.tree import LocalTreeBuilder

V, H, DEPTH = 300, 48, 5


# Sizes that need padding and sizes that need none.
HEADS: dict[str, dict[str, Any]] = {
    "gru": {"kind": "gru", "hidden_size": 64, "rank": 32},
    "gru_odd": {"kind": "gru", "hidden_size": 50, "rank": 19, "rank_activation": "identity"},
    "gru_projected": {"kind": "gru", "hidden_size": 40, "rank": 24, "input_size": 30},
    "gru_direct": {
        "kind": "gru", "hidden_size": 40, "rank": 24, "input_size": 21,
        "parameterization": "direct_vocab",
    },
    "gru_target_head": {
        "kind": "gru", "hidden_size": 96, "rank": 48, "lm_head_mode": "target_lm_head",
    },
    "markov": {"kind": "markov", "rank": 33},
    "markov_direct": {"kind": "markov", "rank": 64, "parameterization": "direct_vocab"},
}  # fmt: skip
# Heads that read the block's states.
SLOT_HEADS: dict[str, dict[str, Any]] = {
    "markov_slots": {"kind": "markov", "rank": 33, "parameterization": "direct_vocab"},
    "gated": {"kind": "gated", "rank": 33, "parameterization": "direct_vocab"},
    "rnn": {"kind": "rnn", "rank": 33, "parameterization": "direct_vocab"},
    "gru_slots": {"kind": "gru", "hidden_size": 50, "rank": 19},
}


def builder(
    name: str,
    dtype: torch.dtype,
    *,
    anchor: bool,
    gate_table_bytes: int = 1 << 20,
    seed: int = 0,
    confidence_weight: float = 0.0,
    has_prior: bool = True,
) -> LocalTreeBuilder:
    torch.manual_seed(seed)
    confidence = None
    if confidence_weight:
        # Tests give the logits of slots.
        unread = torch.empty(0)
        confidence = ConfidenceHead(unread, unread, 2 * torch.randn(V), confidence_weight)
    values = HEADS[name] if name in HEADS else {**SLOT_HEADS[name], "slot_size": H}
    values = {**values, "anchor_input": anchor}
    head = LocalHead(LocalHeadConfig(vocab_size=V, target_hidden_size=H, **values))
    with torch.no_grad():
        for parameter in head.parameters():
            # representable in both dtypes
            parameter.normal_(std=0.4).copy_(parameter.bfloat16().float())
    draft_ids = torch.randperm(V)[:200].sort().values
    weights = (0.5, 0.4, 0.3, 0.6, 0.2) if anchor else (0.0, 0.4, 0.3, 0.6, 0.2)
    prior = torch.randn(V).log_softmax(-1)
    return LocalTreeBuilder(
        head.requires_grad_(False), None, draft_ids, prior if has_prior else None,
        LocalTreeSettings(
            alpha=weights, beta=weights if has_prior else (0.0,) * DEPTH,
            num_candidates=64, gate_table_bytes=gate_table_bytes,
        ),
        embed_tokens=torch.randn(V, H).to(dtype), lm_head=torch.randn(V, H).to(dtype), dtype=dtype,
        confidence=confidence,
    )  # fmt: skip


def candidates(requests: int, count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return top_candidates(2 * torch.randn(requests, DEPTH, 200), count)


LIMITS = {
    "budgets": [12, 1, 40, 0, 7, 30],
    "depths": [DEPTH, 3, 4, 2, 1, 5],
}
WIDTH = 2
