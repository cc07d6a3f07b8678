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
# TYPE specplug:drafts_total counter
specplug:drafts_total{engine="0"} 5.0
"""


def test_sums_engines_and_leaves_look_alikes_out() -> None:
    counters = SpecCounters.parse(PAGE)
    assert counters == SpecCounters(40.0, 24.0, {1: 20.0, 2: 4.0, 3: 0.0})
    assert counters.mean_acceptance_length == pytest.approx(1.6)


def test_no_speculation_has_no_length() -> None:
    assert SpecCounters.parse("# TYPE other counter\nother_total 1.0\n") == SpecCounters()
    assert SpecCounters().mean_acceptance_length is None
