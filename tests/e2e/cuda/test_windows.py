# SPDX-License-Identifier: Apache-2.0
"""A draft layer over a window of its own and the target's last layer, as on CUDA. Its trees are
compared with those of the plain module, which reads the request's tokens and the target's pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig

from tests.e2e.budgets import FLAT, freeze_costs
from tests.e2e.cuda.cuda_drafts import LevelDrafts, knowing
from tests.e2e.cuda.cuda_pairs import (
    INTERPRETED,
    PROMPTS,
    LateCopy,
    compare,
    engines,
    late_copies,
)
from tests.e2e.longspec_module import module_tree
from tests.e2e.pair import target, watch_preemptions, watch_prefix_hits
from tests.e2e.requests import greedy, seeded
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.methods.longspec.checkpoint import load_longspec_head
from vllm_specplug.methods.longspec.drafter import LongSpecDrafter
from vllm_specplug.methods.longspec.train.features import KVSequence
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker.memory.device_window import DeviceWindowCache, PagedDeviceTargetCache

pytestmark = [*INTERPRETED, pytest.mark.full]


def _trees_of_the_module(
    self: Any, requests: DeviceRequests, drafted: list[int]
) -> list[DraftTree]:
    options, history, (pages,) = self.options, requests.history, self.target_caches
    head, _ = load_longspec_head(options.head_path, AutoConfig.from_pretrained(target()))
    # All of it on the host, where the head was loaded.
    embed_tokens, lm_head = self.embed_tokens.cpu(), self.lm_head_weight.cpu()
    trees = []
    for r in drafted:
        context, line = int(requests.context_lens[r]), int(history.lines[r])
        tokens = history.token_ids[line, : context + 1].long().cpu()
        assert tokens[-1] == requests.anchors[r]
        table = pages.block_table()[r if requests.rows is None else int(requests.rows[r])].cpu()
        # The anchor is in no cache yet.
        at = torch.arange(context + 1).clamp_max(max(0, context - 1))
        size = pages.views[0][0].shape[1]
        key, value = (view[table[at // size].long(), at % size].cpu() for view in pages.views[0])
        sequence = KVSequence(tokens, torch.arange(context + 1), 1, key, value, key)
        trees.append(
            module_tree(
                head, sequence, (embed_tokens, lm_head), context,
                budget=int(requests.budgets[r]),
                depth=min(int(requests.depths[r]), options.tree_depth), width=requests.width,
            )
        )  # fmt: skip
    return trees


@contextmanager
def knowing_windows() -> Iterator[LevelDrafts]:
    load = LongSpecDrafter.load

    def loaded(self: Any, weights: Any) -> None:
        load(self, weights)
        self.lm_head_weight = weights.lm_head

    with (
        patch.object(LongSpecDrafter, "load", loaded),
        knowing(LongSpecDrafter, _trees_of_the_module) as seen,
    ):
        yield seen


@pytest.mark.parametrize("ahead", [False, True])
def test_windows_on_the_device(ahead: bool) -> None:
    """One prompt is longer than the window of 24, and the rings come round."""
    with knowing_windows() as drafts:
        made = engines("longspec", ahead=ahead, ngram_topk=0, nodes=10)
        drafts.nodes = 0
        assert compare(made, ahead).skipping > 1
    assert drafts.nodes > 50 and not drafts.differing, drafts


def test_what_a_window_lacks_is_noticed() -> None:
    """The controls: tokens that are not stored, a bound that is too small, windows of other
    requests, and a context that is not attended."""
    with knowing_windows():
        made = engines("longspec", ahead=True, ngram_topk=0, nodes=10)

    def too_few(self: Any, requests: Any) -> Any:
        history = replace(
            requests.history, len_upper_bounds=[n // 8 for n in requests.history.len_upper_bounds]
        )
        return missing(self, replace(requests, history=history))

    def others(self: Any, requests: Any, contexts: Any, parents: Any) -> Any:
        self._tables = self._tables.roll(1)
        return tree_attention(self, requests, contexts, parents)

    missing, tree_attention = DeviceWindowCache.missing, DeviceWindowCache.tree_attention
    controls = {
        "writes": patch.object(DeviceWindowCache, "write", lambda *args: None),
        "bounds": patch.object(DeviceWindowCache, "missing", too_few),
        "rings": patch.object(DeviceWindowCache, "tree_attention", others),
        "contexts": patch.object(
            PagedDeviceTargetCache, "level_attention", lambda *args: torch.zeros_like
        ),
    }
    for name, control in controls.items():
        with knowing_windows() as drafts, control:
            compare(made, True)
        assert drafts.differing, name


def test_windows_of_requests_that_come_back() -> None:
    """After preemption, and on prefix hits, whose tokens no forward computed again."""
    long = [[(7 * i + n) % 250 + 5 for i in range(n)] for n in (40, 41, 42)]
    with knowing_windows() as drafts:
        made = engines(
            "longspec", ahead=True, ngram_topk=0, nodes=10,
            num_gpu_blocks_override=9, enable_prefix_caching=True,
        )  # fmt: skip
        preempted, hits = watch_preemptions(made.tree), watch_prefix_hits(made.tree)
        made.compare(long, greedy(max_tokens=40, detokenize=False))
        assert preempted
        made.compare([long[2]], seeded(3, max_tokens=8, detokenize=False))
    assert max(hits.values()) >= 32, hits
    assert drafts.nodes > 50 and not drafts.differing, drafts
    window = made.runner.drafter.drafter.window
    assert isinstance(window, DeviceWindowCache)


def test_defaults_read_nothing() -> None:
    """A budget that follows the load, and n-gram branches: forwards for some requests of a
    batch."""
    params = [greedy(max_tokens=24, logprobs=2), seeded(1, max_tokens=24), greedy(max_tokens=20)]
    with knowing_windows() as drafts, late_copies():
        made = engines("longspec", ahead=True, nodes=10, budget="auto")
        freeze_costs(made, FLAT)
        LateCopy.waits = 0
        _, counts = made.compare(PROMPTS, params, least_accepted=6)
        assert not LateCopy.waits, LateCopy.waits
    assert counts.stale > 0 and drafts.nodes > 50 and not drafts.differing, (counts, drafts)
