# SPDX-License-Identifier: Apache-2.0
"""A draft cache without pages: one request's context in plain tensors."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.requests import DraftRequests


class DenseCache:
    """Context keys and values of one request by position."""

    def __init__(self, windows: list[int | None] | None = None) -> None:
        self.windows = windows
        # [num_layers, positions, Hkv, Dh]
        self.keys = self.values = torch.empty(0)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self.keys, self.values = keys[:, slots.argsort()], values[:, slots.argsort()]

    def block_attention(self, requests: DraftRequests, rows: int, causal: Any) -> Any:
        assert len(requests) == 1
        n = requests.context_lens[0]

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            key, value = (
                torch.cat((old[layer, :n], new)).repeat_interleave(
                    query.shape[1] // new.shape[1], 1
                )
                for old, new in ((self.keys, key), (self.values, value))
            )
            distance = torch.arange(n, n + rows)[:, None] - torch.arange(n + rows)
            is_causal = causal if isinstance(causal, bool) else causal[layer]
            seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
            window = None if self.windows is None else self.windows[layer]
            if window is not None:
                seen = seen & (distance < window)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), seen
            )
            return mixed.transpose(0, 1)

        return attend


def committed(context: torch.Tensor, num_layers: int) -> CommittedTokens:
    """All of a context [n, L * Ht] at once, in the rows and slots of its positions."""
    index = torch.arange(len(context))
    return CommittedTokens(list(context.chunk(num_layers, -1)), index, index, index)
