# SPDX-License-Identifier: Apache-2.0
"""Tokens that end a request, on the device: no walk may go past one.

What lies behind the end of an answer is thrown away, but vLLM counts it as computed. Where input
goes on after the answer (`StreamingInput`), the next turn would take its K and V for those of its
own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_specplug.kernels import to_device
from vllm_specplug.tree import step_trees
from vllm_specplug.tree.step_trees import StepTrees

MOST_STOP_TOKENS = 128
"""Of one request; vLLM has the same limit beside `min_tokens`. One with more has no drafts."""


def stop_tokens_of(params: Any) -> set[int]:
    """Tokens with which vLLM ends a request of these sampling parameters."""
    return {
        token
        for token in (params.eos_token_id, *(params.stop_token_ids or ()))
        if token is not None
    }


class StopTokens:
    """By request slot.

    Args:
        num_slots: S.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        # [S, MOST_STOP_TOKENS] int64, -1 where there are no more
        shape = (num_slots, MOST_STOP_TOKENS)
        self.token_ids = torch.full(shape, -1, dtype=torch.int64, device=device)

    def put(self, slots: torch.Tensor, tokens: Sequence[set[int]]) -> None:
        """Replaces what the last requests of the slots [n] had; more than fit are left out."""
        rows = np.full((len(tokens), MOST_STOP_TOKENS), -1, np.int64)
        for row, ids in zip(rows, tokens, strict=True):
            kept = sorted(ids)[:MOST_STOP_TOKENS]
            row[: len(kept)] = kept
        self.token_ids[slots] = to_device(rows, self.token_ids.device)

    def mask_after_stop(
        self,
        trees: StepTrees,
        # [M] token of every row
        token_ids: torch.Tensor,
    ) -> StepTrees:
        """The same trees without nodes that end their request: such a token is emitted by the row
        above, and is the last one."""
        if step_trees.has_kernels(token_ids.device):
            return replace(trees, ends=self.token_ids)
        ends = self.token_ids[trees.rows.row_slots] == token_ids[:, None]
        return trees.without(ends.any(1))
