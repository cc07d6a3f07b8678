# SPDX-License-Identifier: Apache-2.0
"""Attention over partial caches on the device, compared row by row with dense attention to the
positions that the caches should hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from vllm_specplug.kernels.reference import dense_attention
from vllm_specplug.vllm_worker.device_self_draft import (
    DevicePartialAttention,
    DevicePartialCache,
)

LONG = [[(7 * i + n) % 250 + 5 for i in range(n)] for n in (60, 61, 62)]
# Chosen again from time to time; until then new tokens take the place of the least important.
SELF = {"draft_source": "self", "kv_budget": 48}


@dataclass
class Watched:
    """Rows of drafts that were compared."""

    whole: int = 0
    partial: int = 0
    chosen: int = 0
    taken_in: int = 0
    far: float = 0.0
    """The largest difference from dense attention."""
    wrong: list[str] = field(default_factory=list)
    # by region and layer: positions int64 [Hkv, budget], covered tokens, and the entry that the
    # next token replaces
    held: dict[tuple[int, int], tuple[torch.Tensor, int, int]] = field(default_factory=dict)


@contextmanager
def watching() -> Iterator[Watched]:
    """Every attention of a draft forward is also made densely."""
    attend, seen = DevicePartialAttention.attend, Watched()

    def watched(self: Any, layer: Any, query: Any, key: Any, value: Any, output: Any) -> None:
        attend(self, layer, query, key, value, output)
        index, pool = self.draft.layer_index[layer.layer_name], self.draft.pool
        pages, dim, device = pool.target_pages[index], query.shape[-1], query.device
        history = self.history
        for r, drafted in enumerate(history.is_drafted):
            if not drafted:
                continue
            length = int(self.lens[r])
            assert history.min_context_lens[r] <= length <= history.max_context_lens[r]
            table = self.block_table[r]
            at = torch.arange(length, device=device)
            context = pages[table[at // pool.block_size].long(), at % pool.block_size]
            heads = torch.arange(context.shape[1], device=device)
            positions = at.expand(len(heads), -1)
            if r in self.partial:
                place = self.partial.index(r)
                region = self.moves.regions[place].index
                if self.moves.due[place]:
                    positions = _chosen(query[r], context, pool)
                    tail = pool.budget - 1
                    seen.chosen += 1
                else:
                    positions, covered, tail = seen.held[region, index]
                    for position in range(covered, length):
                        positions[:, tail] = position
                        tail -= 1
                        seen.taken_in += 1
                    assert tail >= pool.sink - 1
                seen.held[region, index] = positions, length, tail
                seen.partial += 1
            else:
                seen.whole += 1
            kept = context[positions, heads[:, None]].transpose(0, 1)
            expected = dense_attention(
                query[r : r + 1], torch.cat([kept[..., :dim], key[r : r + 1]]),
                torch.cat([kept[..., dim:], value[r : r + 1]]), layer.impl.scale,
                query.shape[1] // len(heads), None,
            )  # fmt: skip
            far = float((expected - output[r]).abs().max())
            seen.far = max(seen.far, far)

    with patch.object(DevicePartialAttention, "attend", watched):
        yield seen


def _chosen(query: torch.Tensor, context: torch.Tensor, pool: DevicePartialCache) -> torch.Tensor:
    keys = context[..., : query.shape[-1]]
    groups = query.unflatten(0, (keys.shape[1], -1))
    scores = torch.einsum("hgd,thd->ht", groups, keys)
    scores[:, : pool.sink] = float("-inf")
    scores[:, -32:] = torch.arange(1e30, 33e30, 1e30)
    best = scores.topk(pool.budget - pool.sink).indices
    sink = torch.arange(pool.sink, device=best.device)
    return torch.cat((sink.expand(len(best), -1), best), dim=1)
