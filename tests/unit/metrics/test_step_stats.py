# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.metrics.step_stats import StepStats

drafts = st.lists(
    st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=8
)


@given(drafts, drafts)
def test_merging_payloads_equals_counting_in_one_place(first, second):
    together, merged = StepStats(), StepStats()
    for part in (first, second):
        here = StepStats()
        for stats in (together, here):
            for num_nodes, num_accepted in part:
                stats.observe_draft(num_nodes, num_accepted)
            stats.observe_plain("batch", 2)
            stats.observe_ms("verify", 3.5)
            stats.step_nodes.append(7)
            stats.tree_budget = len(part)
            stats.observe_prediction(1.5, 2)
        merged.merge(here.drain() or {})
    assert merged == together


def test_nothing_to_tell_is_no_payload():
    stats = StepStats()
    assert stats.drain() is None
    stats.observe_plain("batch", 0)
    assert stats.drain() is None
    stats.merge({})
    assert stats == StepStats()
