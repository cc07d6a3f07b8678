# SPDX-License-Identifier: Apache-2.0
"""Logits processors of the tests, named to engines by dotted path."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForceTokenAt(AdapterLogitsProcessor):
    """Forces a token once a request has so many: extra argument `force` = [count, token id]."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        force = (params.extra_args or {}).get("force")
        if force is None:
            return None
        count, token = force

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) == count:
                logits[:] = -float("inf")
                logits[token] = 0.0
            return logits

        return process


class AlternateHalves(AdapterLogitsProcessor):
    """Even tokens after odd ones and odd ones after even ones: extra argument `alternate`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        if not (params.extra_args or {}).get("alternate"):
            return None

        def process(
            prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
        ) -> torch.Tensor:
            last = (output_ids or prompt_ids)[-1]
            logits[last % 2 :: 2] = -float("inf")
            return logits

        return process
