# SPDX-License-Identifier: Apache-2.0
"""Logits processors of the tests, named to engines by dotted path."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor


class AlternateRows(LogitsProcessor):
    """Even tokens after odd ones and odd ones after even ones: extra argument `alternate`."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.is_on = np.zeros(req_states.max_num_reqs, dtype=bool)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self.is_on[req_idx] = is_on = bool((sampling_params.extra_args or {}).get("alternate"))
        return is_on

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if self.is_on[slot]:
                logits[row, int(ctx.input_ids[row]) % 2 :: 2] = -float("inf")
        return logits


class ForbidHistory(LogitsProcessor):
    """Forbids what the request has generated, and forces a token at a length: extra arguments
    `forbid` and `force` = [count, token id]. Reads committed tokens alone, as processors do that
    know plain decoding only."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.states = req_states
        self.forbids = np.zeros(req_states.max_num_reqs, dtype=bool)
        self.forced: dict[int, tuple[int, int]] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        extra = sampling_params.extra_args or {}
        self.forbids[req_idx] = bool(extra.get("forbid"))
        self.forced.pop(req_idx, None)
        if extra.get("force") is not None:
            self.forced[req_idx] = tuple(extra["force"])
        return bool(self.forbids[req_idx]) or req_idx in self.forced

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            first, end = int(self.states.prompt_len.np[slot]), int(self.states.total_len.gpu[slot])
            if self.forbids[slot]:
                logits[row, self.states.all_token_ids.gpu[slot, first:end].long()] = -float("inf")
            count, token = self.forced.get(slot, (-1, 0))
            if end - first == count:
                logits[row] = -float("inf")
                logits[row, token] = 0.0
        return logits
