# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm_specplug.metrics.exporter import PrometheusExporter
from vllm_specplug.metrics.step_stats import PHASES, PLAIN_REASONS, StepStats

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def sample(registry, name, **extra):
    return registry.get_sample_value(name, {**LABELS, **extra})


def make_payload(num_drafts=2):
    stats = StepStats()
    for i in range(num_drafts):
        stats.observe_draft(10, 3 - i)
    stats.step_nodes.append(10 * num_drafts)
    stats.observe_plain("near_max_len", 4)
    stats.observe_ms("draft", 2.0)
    stats.observe_ms("verify", 30.0)
    stats.observe_ms("verify", 40.0)
    stats.tree_budget = 10
    stats.observe_prediction(2.5, 3)
    return stats.drain()


def test_payload_becomes_metrics(registry):
    exporter = PrometheusExporter(LABELS, registry)
    exporter.observe(make_payload())
    exporter.observe(make_payload())
    assert sample(registry, "specplug:drafts_total") == 4
    assert sample(registry, "specplug:draft_nodes_total") == 40
    assert sample(registry, "specplug:accepted_tokens_total", depth="1") == 4
    assert sample(registry, "specplug:accepted_tokens_total", depth="2") == 4
    assert sample(registry, "specplug:accepted_tokens_total", depth="3") == 2
    assert sample(registry, "specplug:plain_steps_total", reason="near_max_len") == 8
    assert sample(registry, "specplug:verify_seconds_count") == 4
    assert sample(registry, "specplug:verify_seconds_sum") == pytest.approx(0.14)
    assert sample(registry, "specplug:verify_seconds_bucket", le="0.025") == 0
    assert sample(registry, "specplug:verify_seconds_bucket", le="0.05") == 4
    assert sample(registry, "specplug:draft_seconds_sum") == pytest.approx(0.004)
    assert sample(registry, "specplug:compact_seconds_count") == 0
    assert sample(registry, "specplug:step_nodes_sum") == 40
    assert sample(registry, "specplug:tree_budget") == 10
    assert sample(registry, "specplug:predicted_accepted_tokens_total") == 5.0
    assert sample(registry, "specplug:predicted_actual_tokens_total") == 6


def test_all_that_has_a_rate_exists_before_anything_happened(registry):
    exporter = PrometheusExporter(LABELS, registry)
    for reason in PLAIN_REASONS:
        assert sample(registry, "specplug:plain_steps_total", reason=reason) == 0
    for phase in PHASES:
        assert sample(registry, f"specplug:{phase}_seconds_count") == 0
    assert sample(registry, "specplug:drafts_total") == 0
    # A head whose drafts are never accepted has the rate 0.
    stats = StepStats()
    stats.observe_draft(10, 0)
    exporter.observe(stats.drain())
    assert sample(registry, "specplug:accepted_tokens_total", depth="1") == 0


def test_a_second_exporter_shares_the_registry_under_its_own_labels(registry):
    first = PrometheusExporter(LABELS, registry)
    second = PrometheusExporter({"model_name": "m", "engine": "1"}, registry)
    first.observe(make_payload())
    second.observe(make_payload(num_drafts=1))
    assert sample(registry, "specplug:drafts_total") == 2
    other = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value("specplug:drafts_total", other) == 1
    # The same labels again (an engine restarted in this process) go on counting.
    PrometheusExporter(LABELS, registry).observe(make_payload(num_drafts=1))
    assert sample(registry, "specplug:drafts_total") == 3


def test_unknown_keys_and_labels_are_ignored(registry):
    exporter = PrometheusExporter(LABELS, registry)
    exporter.observe({"plain_steps": {"new_reason": 3}, "milliseconds": {"new_phase": [1.0]}})
    exporter.observe({"new_key": 1})
    exporter.observe(None)
    exporter.observe({})
    assert "new_" not in generate_latest(registry).decode()
    assert sample(registry, "specplug:drafts_total") == 0
