# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.metrics import StepStats

drafts = st.lists(
    st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=8
)


@given(drafts)
def test_counts_equal_the_drafts_counted_by_hand(observed):
    stats = StepStats()
    for num_nodes, num_accepted in observed:
        stats.observe_draft(num_nodes, num_accepted)
    assert stats.num_drafts == len(observed)
    assert stats.num_nodes == sum(n for n, _ in observed)
    assert stats.num_accepted == sum(a for _, a in observed)
    deepest = max((a for _, a in observed), default=0)
    assert stats.accepted_by_depth == [
        sum(a >= depth for _, a in observed) for depth in range(1, deepest + 1)
    ]
    if observed:
        mean = 1 + sum(a for _, a in observed) / len(observed)
        assert stats.mean_acceptance_length == pytest.approx(mean)
    else:
        assert stats.mean_acceptance_length == 1.0


@given(drafts, drafts)
def test_merging_payloads_equals_counting_in_one_place(first, second):
    together, merged = StepStats(), StepStats()
    for part in (first, second):
        here = StepStats()
        for stats in (together, here):
            for num_nodes, num_accepted in part:
                adapter = (None, "", "a", "b")[num_nodes % 4]
                stats.observe_draft(num_nodes, num_accepted, adapter)
            stats.observe_plain("batch", 2)
            stats.observe_ms("verify", 3.5)
            stats.observe_step_nodes(7)
            stats.tree_budget = len(part)
            stats.observe_prediction(1.5, 2)
        merged.merge(here.drain() or {})
    assert merged == together


def test_payload_is_plain_data_and_drain_starts_over():
    stats = StepStats()
    stats.observe_draft(8, 2)
    stats.observe_step_nodes(8)
    stats.observe_plain("context")
    stats.observe_ms("draft", 1.25)
    stats.tree_budget = 16
    stats.observe_prediction(1.75, 2)
    payload = stats.drain()
    assert payload == {
        "drafts": 1,
        "nodes": 8,
        "by_depth": [1, 1],
        "plain": {"context": 1},
        "step_nodes": [8],
        "ms": {"draft": [1.25]},
        "budget": 16,
        "predicted": [1.75, 2],
    }
    assert json.loads(json.dumps(payload)) == payload
    assert stats == StepStats()
    # What was handed out is not written to again.
    stats.observe_draft(4, 4)
    stats.observe_plain("context")
    assert payload["by_depth"] == [1, 1]
    assert payload["plain"] == {"context": 1}


def test_nothing_to_tell_is_no_payload():
    stats = StepStats()
    assert stats.drain() is None
    stats.observe_plain("batch", 0)
    assert stats.drain() is None
    stats.merge({})
    assert stats == StepStats()
