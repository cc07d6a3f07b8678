# SPDX-License-Identifier: Apache-2.0
"""Trees as on CUDA on a device that keeps only the order of streams; see `cuda_streams`.

Each test compares with plain vLLM, and fails on any race.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest.mock import patch

# Before vLLM's CPU worker.
from tests.e2e.cuda.cuda_races import kept_pinned, knowing, ordered, races  # isort: skip

import pytest
import torch

from tests import pretended_device
from tests.e2e.budgets import FLAT, freeze_costs
from tests.e2e.cuda.cuda_graphs import draft_replays, full_graphs, steps_from_graphs
from tests.e2e.cuda.cuda_pairs import INTERPRETED, PROMPTS, compare, engines
from tests.e2e.cuda.cuda_partial_caches import SELF
from tests.e2e.families import engine_of
from tests.e2e.grammars import KINDS, constrained
from tests.e2e.pair import Pair, watch_preemptions, watch_prefix_hits
from tests.e2e.requests import greedy, seeded
from tests.pretended_device import Stream
from vllm_specplug.vllm_v2 import device_speculator, host_step
from vllm_specplug.vllm_v2.host_step import HostCopy

pytestmark = [*INTERPRETED, pytest.mark.full, pytest.mark.usefixtures("stream_worker")]


def _params() -> list[Any]:
    return [greedy(max_tokens=24, logprobs=2), seeded(1, max_tokens=24), greedy(max_tokens=20)]


def test_windows_in_groups() -> None:
    """gpt-oss: two tables of blocks."""
    with ordered():
        made = engines(ahead=True, target=engine_of("GptOss"))
        made.compare(PROMPTS, greedy(max_tokens=12, detokenize=False), least_accepted=6)


@pytest.mark.parametrize("ahead", [False, True])
def test_trees_of_the_host(ahead: bool) -> None:
    """The host waits for what a step emitted, and sends its trees."""
    with ordered():
        compare(engines(ahead=ahead), ahead)


def test_a_block_head() -> None:
    with knowing(), ordered():
        made = engines("jetspec", ahead=True, nodes=10, budget=10)
        assert compare(made, True).skipping > 1


def test_ngram_trees() -> None:
    with ordered():
        made = engines("ngram_tree", ahead=True, nodes=10, budget=10)
        _, counts = made.compare(PROMPTS, _params(), least_accepted=6, branching=False)
    assert counts.stale > 0, counts


def _adaptive() -> Pair:
    made = engines("jetspec", ahead=True, nodes=10, budget="auto")
    freeze_costs(made, FLAT)
    return made


def test_an_adaptive_budget() -> None:
    with knowing(), ordered():
        made = _adaptive()
        _, counts = made.compare(PROMPTS, _params(), least_accepted=6)
    assert counts.stale > 0 and made.runner.speculator.reserved is not None, counts


def test_graphs() -> None:
    with full_graphs(), knowing(), ordered():
        made = engines("jetspec", ahead=True, ngram_topk=0, nodes=10)
        with steps_from_graphs(made), draft_replays() as replayed:
            assert compare(made, True).skipping > 1
    assert len(replayed) > 4, replayed


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle3_tree", {"nodes": 10}),
        ("mtp_tree", {"nodes": 10}),
        ("dels", {"nodes": 10}),
        ("longspec", {"nodes": 10}),
        ("tokenswift", {"nodes": 5, "ngram_topk": 0, "head": SELF}),
    ],
)
def test_other_ways_to_draft(method: str, options: dict[str, Any]) -> None:
    """Level by level, with local heads, over windows, by the target itself; scheduled ahead."""
    with knowing(), ordered():
        made = engines(method, ahead=True, **options)
        _, counts = made.compare(PROMPTS, _params(), least_accepted=6)
    assert counts.stale > 0, counts


def test_penalties() -> None:
    """What a request brings along on the host."""
    penalty = {"specplug_penalty": 1.3, "specplug_penalty_window": 16}
    params = [
        greedy(max_tokens=12, extra_args=penalty),
        seeded(1, max_tokens=12, presence_penalty=1.0, repetition_penalty=1.2),
        greedy(max_tokens=12, bad_words=["a"], logit_bias={7: 2.0}, min_tokens=4),
    ]
    with knowing(), ordered():
        made = engines("jetspec", ahead=True, nodes=10, budget=10)
        made.compare(PROMPTS, params, least_accepted=6)


def test_requests_that_come_back() -> None:
    """After preemption, and on prefix hits."""
    long = [[(7 * i + n) % 250 + 5 for i in range(n)] for n in (40, 41, 42)]
    with knowing(), ordered():
        made = engines(
            "jetspec", ahead=True, nodes=10,
            num_gpu_blocks_override=9, enable_prefix_caching=True,
        )  # fmt: skip
        preempted, hits = watch_preemptions(made.tree), watch_prefix_hits(made.tree)
        made.compare(long, greedy(max_tokens=40, detokenize=False))
        made.compare([long[2]], seeded(3, max_tokens=8, detokenize=False))
    assert preempted and max(hits.values()) >= 32, (preempted, hits)


def test_grammars() -> None:
    """Masks and drafts take streams of their own."""
    params = [
        constrained(KINDS["choice"], max_tokens=12),
        constrained(KINDS["regex"], seed=1, max_tokens=16),
        greedy(max_tokens=8),
    ]
    for ahead in (False, True):
        with ordered():
            made = engines(ahead=ahead)
            made.compare(PROMPTS, [param.clone() for param in params])
    with patch.object(pretended_device, "record_stream", lambda *args: None), races() as found:
        made.compare(PROMPTS, [param.clone() for param in params])
    assert any("freed early" in str(race) for race in found), found


class Unwaited(HostCopy):
    has_arrived = True  # type: ignore[assignment]

    def read(self) -> torch.Tensor:
        return self._copy


def test_what_orders_nothing_is_noticed() -> None:
    """The controls. No check of the same engine comes after it: the last one may break it."""
    controls = {
        "a pinned buffer that is used again": (
            patch.object(device_speculator, "to_device", kept_pinned()),
            ("pinned", "device_speculator.py"),
        ),
        "an output stream that does not wait": (
            patch.object(Stream, "wait_stream", lambda *args: None),
            ("device memory", "async_utils.py"),
        ),
        # Last: the host takes what is not there yet for results.
        "a host that does not wait": (
            patch.object(host_step, "HostCopy", Unwaited),
            ("pinned", "host_step.py"),
        ),
    }
    with knowing():
        made = _adaptive()
        for name, (control, told) in controls.items():
            with races() as found, control, suppress(Exception):
                made.compare(PROMPTS, _params())
            texts = [str(race) for race in found]
            assert any(all(part in text for part in told) for text in texts), (name, texts[:3])
