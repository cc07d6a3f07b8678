# SPDX-License-Identifier: Apache-2.0
"""A logits processor of the tests for the V2 runner."""

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
