# SPDX-License-Identifier: Apache-2.0
"""Counters of an engine, of vLLM and of the requests agree."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.e2e.pair import generate, make_engine
from tests.e2e.requests import greedy

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

# Name, labels and value.
Samples = list[tuple[str, dict[str, str], float]]


def measure(name: str, ahead: bool, **options: Any) -> tuple[Samples, list[dict[str, Any]]]:
    """Returns the metrics of an engine and of its requests."""
    llm = make_engine(
        "jetspec", max_num_seqs=4, disable_log_stats=False, served_model_name=name,
        per_request_spec_decode_metrics="detailed", async_scheduling=ahead,
        speculative={"num_speculative_tokens": 6, "max_step_rows": None, **options},
    )  # fmt: skip
    outputs = generate(llm, [[5, 6, 7 + i] for i in range(2)], greedy(max_tokens=40))
    llm.llm_engine.do_log_stats()
    samples = [
        (sample.name, sample.labels, sample.value)
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.labels.get("model_name") == name
    ]
    return samples, [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]


@pytest.fixture(scope="module")
def measured() -> tuple[Samples, list[dict[str, Any]]]:
    return measure("waiting", False, max_step_rows=14, tree_budget=6)


@pytest.fixture(scope="module")
def samples(measured: tuple[Samples, list[dict[str, Any]]]) -> Samples:
    return measured[0]


def value(samples: Samples, name: str, **labels: str) -> float:
    """Sum over the samples of one name with these labels; a missing one fails the test."""
    found = [v for n, has, v in samples if n == name and labels.items() <= has.items()]
    assert found, f"no {name} {labels}"
    return sum(found)


def per_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    return {has[label]: v for n, has, v in samples if n == name}


def assert_counts_agree(samples: Samples, requests: list[dict[str, Any]]) -> None:
    """Asserts that the engine's metrics are vLLM's, and the sums of the requests' metrics."""
    for field, name, vllms in (
        ("num_spec_steps", "drafts_total", "drafts_total"),
        ("num_draft_tokens", "draft_nodes_total", "draft_tokens_total"),
        ("num_accepted_draft_tokens", "accepted_tokens_total", "accepted_tokens_total"),
    ):
        count = value(samples, f"specplug:{name}", engine="0")
        assert count == value(samples, f"vllm:spec_decode_num_{vllms}") > 0
        assert count == sum(request[field] for request in requests)
    for request in requests:
        assert sum(request["acceptance_histogram"]) == len(request["per_step_drafted"])
        assert all(request["per_step_drafted"])


def test_counts_agree_with_vllm(measured):
    assert_counts_agree(*measured)


def test_depths_agree_with_vllm(samples):
    by_depth = per_label(samples, "specplug:accepted_tokens_total", "depth")
    by_position = per_label(
        samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"
    )
    assert by_depth
    for position, count in by_position.items():
        assert by_depth.get(str(int(position) + 1), 0) == count


def test_reserved_rows_without_a_node_are_no_drafts():
    """A scheduler that works ahead reserves rows before it knows how many nodes fill them."""
    assert_counts_agree(*measure("ahead", True, tree_budget="auto"))


def test_phases_are_timed_and_trees_are_within_budget(samples):
    steps = value(samples, "specplug:step_nodes_count")
    assert steps > 0
    for phase in ("draft", "verify", "compact"):
        assert value(samples, f"specplug:{phase}_seconds_count") >= steps
        assert value(samples, f"specplug:{phase}_seconds_sum") > 0
    # Fourteen rows for two requests: seven each, of which one is the root.
    assert value(samples, "specplug:tree_budget") == 6
    assert value(samples, "specplug:step_nodes_sum") == value(samples, "specplug:draft_nodes_total")


def test_steps_without_a_tree_carry_a_reason(samples):
    # The last tokens of each request leave no depth to draft.
    assert value(samples, "specplug:plain_steps_total", reason="near_max_len") > 0
