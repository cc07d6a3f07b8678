# SPDX-License-Identifier: Apache-2.0
"""The target as its own draft, chained heads and n-grams as on CUDA."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.cuda.cuda_pairs import INTERPRETED, LateCopy, engines, late_copies
from tests.e2e.cuda.cuda_partial_caches import LONG, SELF, watching
from tests.e2e.pair import watch_preemptions
from tests.e2e.requests import greedy, seeded
from vllm_specplug.vllm_worker.device_self_draft import DevicePartialCache

pytestmark = [*INTERPRETED, pytest.mark.full]


@pytest.mark.parametrize("ahead", [False, True])
def test_the_target_drafts_for_itself(ahead: bool) -> None:
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


@pytest.mark.parametrize("name", ["_take_in", "choose"])
def test_what_a_partial_cache_lacks_is_noticed(name: str) -> None:
    """The controls: tokens that are not taken in, and nothing chosen."""
    made = engines("tokenswift", ahead=True, ngram_topk=0, nodes=6, head=SELF)
    params = greedy(max_tokens=24, detokenize=False)
    with watching() as seen, patch.object(DevicePartialCache, name, lambda *args: None):
        made.compare([LONG[0], LONG[1]], params)
    assert seen.far > 1e-3, seen.far


def test_self_drafts_after_preemption() -> None:
    with watching() as seen:
        made = engines(
            "tokenswift", ahead=True, ngram_topk=0, nodes=6, head=SELF,
            num_gpu_blocks_override=9,
        )  # fmt: skip
        preempted = watch_preemptions(made.tree)
        made.compare(LONG, greedy(max_tokens=36, detokenize=False))
    assert preempted and seen.partial > 10 and seen.far < 1e-4, (preempted, seen)


@pytest.mark.parametrize(("head", "topk"), [({"draft_source": "heads"}, 3), (SELF, 0)])
def test_chained_heads_and_branches(head: dict[str, Any], topk: int) -> None:
    """Nothing is read: heads, with n-grams and without."""
    penalty = {"specplug_penalty": 1.3, "specplug_penalty_window": 16}
    with late_copies():
        made = engines("tokenswift", ahead=True, ngram_topk=topk, nodes=6, head=head)
        LateCopy.waits = 0
        params = [
            greedy(max_tokens=24), seeded(1, max_tokens=24, extra_args=penalty),
            greedy(max_tokens=24, extra_args=penalty),
        ]  # fmt: skip
        prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], list(range(20, 60)), [9, 9, 9, 9]]
        made.compare(prompts, params, branching=False)
    assert not LateCopy.waits, LateCopy.waits
