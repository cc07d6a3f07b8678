# SPDX-License-Identifier: Apache-2.0
"""The target as its own draft, chained heads and n-grams as on CUDA; see `cuda_checks`.
Attention over partial caches is compared, row by row, with dense attention to the positions that
the caches should hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

# Before vLLM: it puts Triton's interpreter in place.
import tests.e2e.cuda.cuda_checks  # noqa: F401  # isort: skip

import torch

from tests.e2e.cuda.cuda_checks import LateCopy, compare, engines, late_copies, profiles
from tests.e2e.pair import watch_preemptions
from tests.e2e.requests import greedy, seeded
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
        index, pool = self.layer_index[layer.layer_name], self.pool
        pages, dim, device = pool.target_pages[index], query.shape[-1], query.device
        for r, drafted in enumerate(self.contexts.is_drafted):
            if not drafted:
                continue
            length = int(self.contexts.lens[r])
            assert self.contexts.least[r] <= length <= self.contexts.most[r]
            table = self.block_table[self.contexts.rows[r]]
            at = torch.arange(length, device=device)
            context = pages[table[at // pool.block_size].long(), at % pool.block_size]
            heads = torch.arange(context.shape[1], device=device)
            positions = at.expand(len(heads), -1)
            if r in self.partial:
                place = self.partial.index(r)
                region = self.regions[place].index
                if self.due[place]:
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
            expected, _ = dense_attention(
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


def check_the_target_drafts_for_itself() -> None:
    for ahead in (False, True):
        with watching() as seen:
            made = engines("tokenswift", ahead=ahead, ngram_topk=0, nodes=6, head=SELF)
            drafter = made.runner.drafter.drafter
            drafter.steps_from.clear()
            prompts = [LONG[0][:44], [5, 6, 7, 8, 5, 6, 7], LONG[1]]
            params = [greedy(max_tokens=24), seeded(1, max_tokens=16), greedy(max_tokens=24)]
            _, counts = made.compare(prompts, params, least_accepted=6)
        assert (counts.stale > 0) == ahead and counts.skipping > 1, counts
        assert set(drafter.steps_from) == {"self"}, drafter.steps_from
        assert seen.whole > 10 and seen.partial > 10 and seen.taken_in > 4 and seen.chosen, seen
        assert seen.far < 1e-4, seen.far


def check_the_profile_counts_the_partial_caches() -> None:
    """And no more than a page of each layer where every context fits the budget."""
    for head, requests in ((SELF, 4), ({**SELF, "kv_budget": 256}, 0)):
        with profiles() as counted:
            made = engines("tokenswift", ahead=True, ngram_topk=0, nodes=5, head=head)
        pool = made.runner.drafter.drafter.target_forward.pool
        assert pool.max_requests == requests
        assert counted == [pool.num_bytes] and counted[0], counted


def check_what_a_partial_cache_lacks_is_noticed() -> None:
    """The controls: tokens that are not taken in, and nothing chosen."""
    made = engines("tokenswift", ahead=True, ngram_topk=0, nodes=6, head=SELF)
    params = greedy(max_tokens=24, detokenize=False)
    for name in ("_take_in", "choose"):
        with watching() as seen, patch.object(DevicePartialCache, name, lambda *args: None):
            made.compare([LONG[0], LONG[1]], params)
        assert seen.far > 1e-3, (name, seen.far)


def check_self_drafts_after_preemption() -> None:
    with watching() as seen:
        made = engines(
            "tokenswift", ahead=True, ngram_topk=0, nodes=6, head=SELF,
            num_gpu_blocks_override=9,
        )  # fmt: skip
        preempted = watch_preemptions(made.tree)
        made.compare(LONG, greedy(max_tokens=36, detokenize=False))
    assert preempted and seen.partial > 10 and seen.far < 1e-4, (preempted, seen)


def check_chained_heads_and_branches() -> None:
    """Nothing is read: heads, with n-grams and without."""
    penalty = {"specplug_penalty": 1.3, "specplug_penalty_window": 16}
    with late_copies():
        for head, topk in (({"draft_source": "heads"}, 3), ({"draft_source": "auto"}, 3),
                           (SELF, 0)):  # fmt: skip
            made = engines("tokenswift", ahead=True, ngram_topk=topk, nodes=6, head=head)
            LateCopy.waits = 0
            params = [
                greedy(max_tokens=24), seeded(1, max_tokens=24, extra_args=penalty),
                greedy(max_tokens=24, extra_args=penalty),
            ]  # fmt: skip
            prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], list(range(20, 60)), [9, 9, 9, 9]]
            made.compare(prompts, params, branching=False)
            assert not LateCopy.waits, (head, LateCopy.waits)


def check_a_scheduler_that_waits() -> None:
    made = engines("tokenswift", ahead=False, ngram_topk=3, nodes=6, head=SELF, budget="auto")
    compare(made, False)
