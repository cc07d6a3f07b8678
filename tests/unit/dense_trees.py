# SPDX-License-Identifier: Apache-2.0
"""Attention of drafted trees over contexts in plain tensors, and caches of the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.caches import TargetCacheSpec
from vllm_specplug.kernels.masks import ancestor_words, words_to_bool
from vllm_specplug.kernels.reference import dense_attention

# Keys and values [n, Hkv, Dh] of a request's context.
Context = tuple[torch.Tensor, torch.Tensor]


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    contexts: list[Context],
    parents: list[np.ndarray],
    window: int | None = None,
) -> torch.Tensor:
    """Rows [T, Hq, Dh] of all requests, each its anchor and then its nodes with `parents`: a row
    attends its request's context and its own branch, with a `window` only the last positions of
    them."""
    out, start = torch.empty_like(query), 0
    for (old_keys, old_values), up in zip(contexts, parents, strict=True):
        rows, length = slice(start, start + len(up) + 1), len(old_keys)
        start = rows.stop
        mask = torch.ones(len(up) + 1, length + len(up) + 1, dtype=torch.bool)
        mask[:, length:] = words_to_bool(ancestor_words([up]), len(up) + 1)
        if window is not None:
            # What a row attends comes in the order of positions.
            mask &= mask.sum(1, keepdim=True) - mask.cumsum(1) < window
        out[rows], _ = dense_attention(
            query[rows], torch.cat([old_keys, key[rows]]), torch.cat([old_values, value[rows]]),
            query.shape[-1] ** -0.5, query.shape[1] // key.shape[1], mask,
        )  # fmt: skip
    assert start == len(query)
    return out


class DenseTarget:
    """A layer's keys and values of each request, by row of the block table; on a device rows of
    levels of any size."""

    def __init__(
        self,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        spec: TargetCacheSpec,
        on_device: bool,
    ) -> None:
        self.caches, self.spec, self.on_device = caches, spec, on_device

    def level_attention(
        self, requests: Any, context_lens: torch.Tensor, owners: torch.Tensor
    ) -> Any:
        indices = requests.req_indices

        def attend(query: torch.Tensor) -> torch.Tensor:
            of = owners
            if self.on_device:
                of = torch.arange(len(indices)).repeat_interleave(len(query) // len(indices))
            out = torch.empty_like(query)
            for r in of.unique().tolist():
                length = int(context_lens[r])
                first = max(0, length - self.spec.window) if self.spec.window else 0
                key, value = (x[first:length] for x in self.caches[indices[r]])
                group = query.shape[1] // key.shape[1]
                out[of == r], _ = dense_attention(
                    query[of == r], key, value, self.spec.scale, group, None
                )
            return out

        return attend
