# SPDX-License-Identifier: Apache-2.0
"""Attention of drafted rows over contexts in plain tensors, and the caches of drafts in them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.caches import DraftCacheSpec, TargetCacheSpec
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
    is_causal: bool = True,
) -> torch.Tensor:
    """Rows [T, Hq, Dh] of all requests, each its anchor and then its nodes with `parents`: a row
    attends its request's context and its own branch, with a `window` only the last positions of
    them. Without `is_causal` it attends the rows behind it, too."""
    out, start = torch.empty_like(query), 0
    for (old_keys, old_values), up in zip(contexts, parents, strict=True):
        rows, length = slice(start, start + len(up) + 1), len(old_keys)
        start = rows.stop
        branch = torch.ones(len(up) + 1, length + len(up) + 1, dtype=torch.bool)
        branch[:, length:] = words_to_bool(ancestor_words([up]), len(up) + 1)
        mask = branch if is_causal else torch.ones_like(branch)
        if window is not None:
            # A branch comes in the order of positions.
            mask = mask & (branch.sum(1, keepdim=True) - branch.cumsum(1) < window)
        out[rows] = dense_attention(
            query[rows], torch.cat([old_keys, key[rows]]), torch.cat([old_values, value[rows]]),
            query.shape[-1] ** -0.5, query.shape[1] // key.shape[1], mask,
        )  # fmt: skip
    assert start == len(query)
    return out


class DenseCache:
    """Pages of draft layers as one table of slots; request r owns the slots from 100 * r on."""

    def __init__(
        self, specs: Sequence[DraftCacheSpec], on_device: bool = False, unwritten: float = np.nan
    ) -> None:
        self.on_device = on_device
        self.windows = [spec.window for spec in specs]
        shape = (len(specs), 1000, specs[0].num_kv_heads, specs[0].head_dim)
        self.key, self.value = torch.full((2, *shape), unwritten)

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, first_layer: int = 0
    ) -> None:
        layers = slice(first_layer, first_layer + len(keys))
        self.key[layers, slots], self.value[layers, slots] = keys, values

    def context_attention(
        self, table_rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Any:
        requests = SimpleNamespace(req_indices=table_rows.tolist())
        alone = [np.zeros(0, np.int32)] * len(slots)
        return self._attention(requests, positions, alone)

    def block_attention(self, requests: Any, rows: int, causal: bool | Sequence[bool]) -> Any:
        masks = [causal] * len(self.windows) if isinstance(causal, bool) else causal
        contexts = torch.as_tensor(requests.context_lens)
        chains = [np.arange(-1, rows - 2, dtype=np.int32)] * len(requests)
        return self._attention(requests, contexts, chains, masks)

    def tree_attention(self, requests: Any, context_lens: torch.Tensor, parents: Any) -> Any:
        if self.on_device:
            # The places of a level, some of which hold no node.
            assert (parents[:, 0] == -1).all()
            parents = [np.asarray(line[1:]) - 1 for line in parents.tolist()]
        return self._attention(requests, context_lens, parents)

    def _attention(
        self,
        requests: Any,
        context_lens: torch.Tensor,
        parents: list[np.ndarray],
        causal: Sequence[bool] | None = None,
    ) -> Any:
        indices = getattr(requests, "req_indices", range(len(parents)))
        slots = [
            slice(100 * index, 100 * index + length)
            for index, length in zip(indices, context_lens.tolist(), strict=True)
        ]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            contexts = [(self.key[layer, at], self.value[layer, at]) for at in slots]
            is_causal = causal is None or causal[layer]
            return tree_attention(q, k, v, contexts, parents, self.windows[layer], is_causal)

        return attend


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
        indices = range(len(requests)) if self.on_device else requests.req_indices

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
                out[of == r] = dense_attention(
                    query[of == r], key, value, self.spec.scale, group, None
                )
            return out

        return attend
