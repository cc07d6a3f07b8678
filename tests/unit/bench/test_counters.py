# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm_specplug.bench.counters import SpecCounters

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1"} 30.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 640.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 24.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 0.0
# HELP specplug:plain_steps_total Plain steps.
# TYPE specplug:plain_steps_total counter
specplug:plain_steps_total{engine="0",reason="batch"} 5.0
specplug:plain_steps_total{engine="1",reason="batch"} 3.0
specplug:plain_steps_total{engine="0",reason="context"} 0.0
# HELP specplug:step_nodes Nodes.
# TYPE specplug:step_nodes histogram
specplug:step_nodes_bucket{engine="0",le="+Inf"} 20.0
specplug:step_nodes_count{engine="0"} 20.0
specplug:step_nodes_sum{engine="0"} 640.0
# HELP specplug:draft_seconds Time.
# TYPE specplug:draft_seconds histogram
specplug:draft_seconds_bucket{engine="0",le="+Inf"} 20.0
specplug:draft_seconds_count{engine="0"} 20.0
specplug:draft_seconds_sum{engine="0"} 0.0905
"""


def test_sums_engines_and_leaves_look_alikes_out() -> None:
    counters = SpecCounters.parse(PAGE)
    assert counters == SpecCounters(
        drafts=40.0,
        draft_tokens=640.0,
        accepted_tokens=24.0,
        accepted_by_depth={1: 20.0, 2: 4.0, 3: 0.0},
        plain_steps={"batch": 8.0, "context": 0.0},
        draft_steps=20.0,
        draft_step_nodes=640.0,
        milliseconds={"draft": 90.5},
    )
    assert counters.mean_acceptance_length == pytest.approx(1.6)


def test_difference_over_a_run() -> None:
    before = SpecCounters(
        drafts=30.0, draft_tokens=480, accepted_tokens=4, accepted_by_depth={1: 4.0},
        plain_steps={"batch": 6.0}, draft_steps=15.0, milliseconds={"draft": 90.0},
    )  # fmt: skip
    run = SpecCounters.parse(PAGE) - before
    assert run.mean_acceptance_length == pytest.approx(3.0)
    assert run.to_json() == {
        "drafts": 10.0,
        "draft_tokens": 160.0,
        "accepted_tokens": 20.0,
        "accepted_by_depth": [16.0, 4.0],
        "plain_steps": {"batch": 2.0},
        "draft_steps": 5.0,
        "draft_step_nodes": 640.0,
        "milliseconds": {"draft": 0.5},
    }


def test_no_speculation_has_no_length() -> None:
    assert SpecCounters.parse("# TYPE other counter\nother_total 1.0\n") == SpecCounters()
    assert SpecCounters().mean_acceptance_length is None and SpecCounters().to_json() == {}
