# SPDX-License-Identifier: Apache-2.0
"""Draft requests for a block head, and attention without a context."""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.drafters import requests_of
from vllm_specplug.drafting.requests import DraftRequests

VOCAB = 20


class NoContext:
    """Attention of a block over nothing but itself."""

    def write(self, *args: Any) -> None:
        raise AssertionError("nothing was observed")

    def block_attention(self, requests: DraftRequests, rows: int, causal: bool) -> Any:
        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            group = query.shape[1] // key.shape[1]
            q, k, v = (
                x.unflatten(0, (len(requests), rows)).transpose(1, 2)
                for x in (
                    query,
                    key.repeat_interleave(group, 1),
                    value.repeat_interleave(group, 1),
                )
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return mixed.transpose(1, 2).flatten(0, 1)

        return attend


def draft_requests() -> DraftRequests:
    return requests_of([[1, 2, 3], [4], [5, 6, 5, 6]], [12, 5, 9], 4, [4, 1, 3])
