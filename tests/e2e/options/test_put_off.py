# SPDX-License-Identifier: Apache-2.0
"""Heads whose context is put off while drafts do not pay: what they draft later is what they would
have drafted, and where the context is gone they draft nothing.

The gate opens and closes by a script, so that nothing depends on how busy the machine is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.e2e.budgets import FLAT, freeze_costs
from tests.e2e.pair import (
    Pair,
    core_of,
    generate,
    make_engine,
    scheduled,
    sequences_of,
    watch_preemptions,
    watch_prefix_hits,
)
from tests.e2e.requests import greedy
from vllm_specplug.budget.draft_gate import DraftGate, GateDecision
from vllm_specplug.tree import DraftTree

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

AUTO = {"tree_budget": "auto", "num_speculative_tokens": 4}
# One branch: the order of a tree's nodes follows rounding where their scores are close.
CHAIN = {**AUTO, "tree_width": 1, "ngram_topk": 0}
PROMPTS = [[3 + (5 * i * i + k) % 60 for i in range(8 + 9 * k)] for k in range(4)]
LONG = [3 + (7 * i * i + 3 * i) % 60 for i in range(101)]
OTHER = [3 + (11 * i * i + 5 * i) % 60 for i in range(101)]
AGAIN = [*LONG[:96], 62, 3]
SHUT = 5
MANY = greedy(max_tokens=40, ignore_eos=True)
HEADS = pytest.mark.parametrize("method", ["jetspec", "eagle3_tree"])


class ScriptedGate(DraftGate):
    """Shut for the first `shut` decisions, each of which holds for some steps; with `probes` every
    other one is a probe."""

    def __init__(self, deepest: int, shut: int, probes: bool = True) -> None:
        super().__init__(deepest)
        self.shut, self.probes = shut, probes
        self.steps = 0

    def decide(self, slots: Any, limits: Any, *args: Any, **kwargs: Any) -> GateDecision:
        place, self.steps = self.steps, self.steps + 1
        self.is_on = place >= self.shut
        if self.is_on:
            return GateDecision(np.array(limits))
        depths = np.zeros_like(limits)
        allowed = np.flatnonzero(limits)
        if self.probes and place % 2 and len(allowed):
            depths[allowed[0]] = limits[allowed[0]]
        return GateDecision(depths, is_probe=True)


class Watched:
    """An engine with a scripted gate, what its head drafts by the tokens before it, and what was
    put off."""

    def __init__(self, llm: Any, shut: int) -> None:
        self.llm = llm
        self.runner = core_of(llm).model_executor.driver_worker.worker.model_runner
        self.drafter = self.runner.drafter.drafter
        if self.runner.planner.is_adaptive:
            freeze_costs(Pair(None, llm), FLAT)
            self.restart(shut)
        self.backlog = self.drafter.backlog
        self.seen: dict[tuple[int, ...], DraftTree] = {}
        self.most_waiting = 0
        draft = self.drafter.draft

        def noted(requests: Any, *args: Any) -> Any:
            waiting = self.backlog._deferred.num_tokens
            self.most_waiting = max(self.most_waiting, waiting)
            trees = draft(requests, *args)
            for tokens, tree in zip(requests.token_ids, trees, strict=True):
                self.seen[tuple(tokens.tolist())] = tree
            return trees

        self.drafter.draft = noted

    def generate(self, prompts: list[list[int]], params: Any = MANY) -> list[list[int]]:
        return sequences_of(generate(self.llm, prompts, params))

    def restart(self, shut: int, probes: bool = True) -> None:
        """The script from its beginning; nothing was decided before."""
        gate = ScriptedGate(self.drafter.forward_depth, shut, probes)
        self.runner.planner.adaptive.gate = gate
        self.drafter.set_deferred(shut > 0)


def _engine(method: str, shut: int, speculative: dict[str, Any] = CHAIN, **engine: Any) -> Watched:
    engine = {"max_num_batched_tokens": 40, "enable_prefix_caching": True, **engine}
    return Watched(make_engine(method, speculative=speculative, **engine), shut)


def _differences(ours: Watched, always: Watched, least: int) -> list[int]:
    """Lengths of the contexts after which two engines drafted otherwise, of `least` at least."""
    common = set(ours.seen) & set(always.seen)
    assert len(common) > least, (len(common), len(ours.seen), len(always.seen))
    found = []
    for known in common:
        trees = ours.seen[known], always.seen[known]
        # Near the end of a request fewer are drafted.
        count = min(tree.num_nodes for tree in trees)
        assert count > 0
        a, b = (tree.prefix(count) for tree in trees)
        same = a.token_ids.tolist() == b.token_ids.tolist()
        if not (same and np.allclose(a.scores, b.scores, atol=1e-4)):
            found.append(len(known))
    return found


@HEADS
def test_drafts_are_what_they_would_have_been(method: str) -> None:
    """Through chunks, preemption, prefix hits and the gate's opening and closing."""
    always = _engine(method, 0)
    ours = _engine(method, SHUT, num_gpu_blocks_override=9)
    preempted, hits = watch_preemptions(ours.llm), watch_prefix_hits(ours.llm)
    batches = ([LONG, *PROMPTS], [LONG], [AGAIN])

    def serve() -> None:
        # The last two alone, so that what they share is still there.
        for prompts in batches:
            assert always.generate(prompts) == ours.generate(prompts)
            ours.restart(SHUT)

    serve()
    assert preempted and any(hits.values()), (preempted, hits)
    assert ours.most_waiting > 60, ours.most_waiting
    assert _differences(ours, always, 12) == []
    # Were what waits not written, drafts would differ.
    ours.seen.clear()
    ours.backlog._write_rows = lambda rows: None
    serve()
    assert _differences(ours, always, 12)


@HEADS
def test_nothing_is_drafted_from_a_context_that_is_gone(method: str) -> None:
    """Blocks whose target states are in the prefix cache, and whose draft context is not."""
    always = _engine(method, 0)
    always.generate([LONG]), always.generate([AGAIN])
    found = []
    for checks in (True, False):
        ours = _engine(method, 1000)
        ours.restart(1000, probes=False)
        waiting = ours.backlog._deferred
        assert waiting is not None
        ours.generate([PROMPTS[0]], greedy(max_tokens=2))
        # Room for one of the next two.
        waiting._max_bytes = 150 * sum(buffer[0].nbytes for buffer in waiting._buffers)
        if not checks:
            ours.backlog.is_incomplete = lambda req_id: False
        ours.generate([LONG], greedy(max_tokens=2, ignore_eos=True))
        ours.generate([OTHER], greedy(max_tokens=2, ignore_eos=True))
        hits = watch_prefix_hits(ours.llm)
        ours.restart(0)
        assert not ours.seen
        reasons = _reasons(ours)
        assert ours.generate([AGAIN]) == always.generate([AGAIN])
        assert max(hits.values()) >= 64, hits
        found.append((len(ours.seen), reasons.count("no_context")))
        if not checks:
            assert _differences(ours, always, 5), "the dropped context made no difference"
    (drafted, counted_steps), (drafted_stale, _) = found
    assert drafted == 0 and counted_steps > 20, found
    assert drafted_stale > 5, found


def _reasons(ours: Watched) -> list[str]:
    """Why single requests decode steps plainly; grows."""
    reasons: list[str] = []
    stats = ours.runner.tree_metrics.stats
    counted = stats.observe_plain

    def noted(reason: str, count: int = 1) -> None:
        reasons.extend([reason] * count)
        counted(reason, count)

    stats.observe_plain = noted
    return reasons


@HEADS
def test_who_asks_is_drafted_for(method: str) -> None:
    """With no drafts unless a request asks, contexts wait; who asks gets what it would have got."""
    # With lookups: of random heads nothing is accepted.
    always = _engine(method, 0, {**AUTO, "tree_budget": 4})
    ours = _engine(method, 0, {**AUTO, "tree_budget": 0, "max_request_budget": 4})
    assert always.generate(PROMPTS) == ours.generate(PROMPTS)
    assert always.generate([LONG]) == ours.generate([LONG])
    assert always.seen and not ours.seen
    assert ours.backlog._deferred.num_tokens > 200, ours.backlog._deferred.num_tokens
    hits = watch_prefix_hits(ours.llm)
    asks = greedy(max_tokens=40, ignore_eos=True, extra_args={"specplug_tree_budget": 4})
    verified = Pair(None, ours.llm)
    verified.watch()
    repeated = [[*p, *([5, 6, 7, 8] * 12)] for p in PROMPTS]
    for prompts in ([AGAIN], PROMPTS, repeated):
        assert always.generate(prompts) == ours.generate(prompts, asks)
    assert max(hits.values()) >= 64, hits
    assert _differences(ours, always, 12) == []
    assert verified.counts.accepted > 5, verified.counts
    # Were what waits not written, drafts would differ.
    ours.backlog._write_rows = lambda rows: None
    assert always.generate([OTHER]) == ours.generate([OTHER], asks)
    assert _differences(ours, always, 12)


def compare_outputs(method: str, ahead: bool) -> None:
    """Lookups, the head and a gate that opens and closes, with default trees."""
    engines = scheduled(ahead, method, speculative=AUTO, enable_prefix_caching=True)
    ours = Watched(engines.tree, SHUT)
    repeated = [[*p, *([5, 6, 7, 8] * 12)] for p in PROMPTS]
    for prompts in (repeated, [*PROMPTS, repeated[0]], [LONG]):
        engines.compare(prompts, MANY, branching=False)
        ours.restart(SHUT)
    assert ours.seen and ours.most_waiting > 20


def test_outputs_are_plain_ones() -> None:
    compare_outputs("jetspec", ahead=False)
    compare_outputs("eagle3_tree", ahead=True)
