# SPDX-License-Identifier: Apache-2.0
"""Tokens that end a request, on the device: no walk may go past one.

vLLM 0.32 discards tokens after the end of an answer but counts them as computed. If input goes on
after the answer (`StreamingInput`), the next turn would take their keys and values for those of its
own tokens. vLLM 0.33 corrects the count.
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

MAX_STOP_TOKENS = 128
"""Maximum stop tokens of a request; a request with more gets no drafts. vLLM has the same limit for
`min_tokens`."""


def stop_tokens_of(params: Any) -> set[int]:
    """Returns the tokens with which vLLM ends a request with these sampling parameters."""
    return {
        token
        for token in (params.eos_token_id, *(params.stop_token_ids or ()))
        if token is not None
    }


class StopTokens:
    """The stop tokens of each request slot.

    Args:
        num_slots: S.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        # [S, MAX_STOP_TOKENS] int64, padded with -1
        shape = (num_slots, MAX_STOP_TOKENS)
        self.token_ids = torch.full(shape, -1, dtype=torch.int64, device=device)

    def put(self, slots: torch.Tensor, tokens: Sequence[set[int]]) -> None:
        """Sets the stop tokens of the slots [n]. Drops those beyond `MAX_STOP_TOKENS`."""
        rows = np.full((len(tokens), MAX_STOP_TOKENS), -1, np.int64)
        for row, ids in zip(rows, tokens, strict=True):
            kept = sorted(ids)[:MAX_STOP_TOKENS]
            row[: len(kept)] = kept
        self.token_ids[slots] = to_device(rows, self.token_ids.device)

    def mask_after_stop(
        self,
        trees: StepTrees,
        # [M] token of every row
        token_ids: torch.Tensor,
    ) -> StepTrees:
        """Returns the trees without nodes that end their request. The parent row emits such a token
        itself, as its last one."""
        if step_trees.has_kernels(token_ids.device):
            return replace(trees, ends=self.token_ids)
        ends = self.token_ids[trees.rows.row_slots] == token_ids[:, None]
        return trees.without(ends.any(1))
