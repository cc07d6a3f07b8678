# SPDX-License-Identifier: Apache-2.0
"""A draft cache without pages: one request's context in plain tensors, or no context at all."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.requests import DraftRequests


class DenseCache:
    """Context keys and values of one request by position. Until they are written, blocks of any
    requests attend nothing but themselves."""

    def __init__(self, windows: list[int | None] | None = None) -> None:
        self.windows = windows
        # [num_layers, positions, Hkv, Dh]
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self.keys, self.values = keys[:, slots.argsort()], values[:, slots.argsort()]

    def block_attention(self, requests: DraftRequests, rows: int, causal: Any) -> Any:
        count = len(requests)
        assert self.keys is None or count == 1
        n = 0 if self.keys is None else requests.context_lens[0]

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            group = query.shape[1] // key.shape[1]
            q, k, v = (x.unflatten(0, (count, rows)) for x in (query, key, value))
            if self.keys is not None and self.values is not None:
                k = torch.cat((self.keys[layer, None, :n], k), 1)
                v = torch.cat((self.values[layer, None, :n], v), 1)
            distance = torch.arange(n, n + rows)[:, None] - torch.arange(n + rows)
            is_causal = causal if isinstance(causal, bool) else causal[layer]
            seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
            window = None if self.windows is None else self.windows[layer]
            if window is not None:
                seen = seen & (distance < window)
            q, k, v = (
                x.transpose(1, 2)
                for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
            return mixed.transpose(1, 2).flatten(0, 1)

        return attend


def committed(context: torch.Tensor, num_layers: int) -> CommittedTokens:
    """All of a context [n, L * Ht] at once, in the rows and slots of its positions."""
    index = torch.arange(len(context))
    return CommittedTokens(list(context.chunk(num_layers, -1)), index, index, index)
