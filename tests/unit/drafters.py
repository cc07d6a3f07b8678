# SPDX-License-Identifier: Apache-2.0
"""Drafters over heads on disk and requests for them, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.drafter import Drafter, DrafterOptions, TargetWeights
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import multiply_experts
from vllm_specplug.methods.block.fused_parts import plain_linear

USUAL = {
    "num_nodes": 12, "tree_depth": 4, "max_depth": 12, "tree_width": 4, "ngram_topk": 0,
    "max_model_len": 64,
}  # fmt: skip


def load_drafter(
    make: Callable[[DrafterOptions], Drafter],
    head: Path,
    settings: Any,
    # [V, H]
    lm_head: torch.Tensor,
    embed: torch.Tensor | None = None,
    text_config: Any = None,
    **options: Any,
) -> Any:
    """A drafter for a target with these tables, of which a shape may be all; `options` are those of
    `DrafterOptions` that are not the usual ones."""
    vocab, hidden = lm_head.shape
    drafter = make(DrafterOptions(head_path=str(head), settings=settings, **{**USUAL, **options}))
    drafter.load(
        TargetWeights(
            embed_tokens=lm_head if embed is None else embed, lm_head=lm_head, dtype=lm_head.dtype,
            device=lm_head.device, make_linear=plain_linear,
            multiply_experts=multiply_experts,
            text_config=text_config
            or SimpleNamespace(hidden_size=hidden, vocab_size=vocab, num_hidden_layers=2),
        )
    )  # fmt: skip
    return drafter


def requests_of(
    texts: Sequence[Any],
    budgets: Sequence[int] | int,
    width: int,
    depths: Sequence[int] | int = 16,
    **more: Any,
) -> DraftRequests:
    """Requests whose last token is the anchor."""
    count = len(texts)
    each = ([x] * count if isinstance(x, int) else [*x] for x in (budgets, depths))
    return DraftRequests(
        [f"r{i}" for i in range(count)], [np.asarray(text) for text in texts],
        [len(text) - 1 for text in texts], list(range(count)), *each, width=width, **more,
    )  # fmt: skip
