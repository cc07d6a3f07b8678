# SPDX-License-Identifier: Apache-2.0
"""The channel from a runner's output to /metrics, with vLLM's own classes at both ends.

`tests/e2e/serve/test_metrics.py` has the whole way across vLLM's process boundary.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from vllm_specplug.engine import metrics_bridge
from vllm_specplug.engine.spec_config import SpecPlugSpeculativeConfig
from vllm_specplug.metrics import STATS_ATTRIBUTE, StepStats


def make_payload() -> dict:
    stats = StepStats()
    stats.observe_draft(16, 2)
    stats.observe_plain("batch", 3)
    stats.observe_ms("verify", 31.5)
    stats.tree_budget = 16
    payload = stats.drain()
    assert payload is not None
    return payload


@pytest.mark.parametrize(("has_payload", "log_stats"), [(True, True), (False, True), (True, False)])
def test_scheduler_hands_on_what_the_runner_attached(has_payload, log_stats):
    payload = make_payload()
    output = SimpleNamespace(**({STATS_ATTRIBUTE: payload} if has_payload else {}))
    stock = SchedulerStats(num_running_reqs=1) if log_stats else None
    update = metrics_bridge.wrap_update_from_output(
        lambda *args: {0: EngineCoreOutputs(scheduler_stats=stock)}
    )
    stats = update(SimpleNamespace(running=[]), None, output)[0].scheduler_stats
    if not log_stats:
        assert stats is None
        return
    assert stats.num_running_reqs == 1
    assert getattr(stats, "specplug_stats", None) == (payload if has_payload else None)


def make_vllm_config(plugin_method: str | None):
    speculative_config = object.__new__(SpecPlugSpeculativeConfig)
    object.__setattr__(speculative_config, "plugin_method", plugin_method)
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=f"bridge-test-{plugin_method}"),
        speculative_config=speculative_config,
    )


@pytest.fixture
def manager_cls(monkeypatch):
    """vLLM's manager, wrapped for this test only, with its own Prometheus logger left out."""
    from vllm.v1.metrics import loggers

    class NoPrometheus(loggers.PrometheusStatLogger):
        def __init__(self, vllm_config, engine_indexes):
            pass

        def record(self, *args, **kwargs):
            pass

    stock = inspect.unwrap(loggers.StatLoggerManager.__init__)
    wrapped = metrics_bridge.wrap_stat_logger_manager(stock)
    monkeypatch.setattr(loggers.StatLoggerManager, "__init__", wrapped)
    return lambda config, engines: loggers.StatLoggerManager(
        config, engines, custom_stat_loggers=[NoPrometheus], enable_default_loggers=False
    )


def test_front_end_counts_by_engine(manager_cls):
    config = make_vllm_config("jetspec")
    manager = manager_cls(config, [0, 1])
    manager.record(metrics_bridge.TreeSchedulerStats(specplug_stats=make_payload()), None)
    for _ in range(2):
        stats = metrics_bridge.TreeSchedulerStats(specplug_stats=make_payload())
        manager.record(stats, None, engine_idx=1)
    manager.record(metrics_bridge.TreeSchedulerStats(), None)
    manager.record(None, None)
    for engine, drafts in (("0", 1), ("1", 2)):
        labels = {"model_name": config.model_config.served_model_name, "engine": engine}
        assert REGISTRY.get_sample_value("specplug:drafts_total", labels) == drafts


def test_front_end_without_our_method_gets_no_logger(manager_cls):
    manager = manager_cls(make_vllm_config(None), [0])
    assert not [s for s in manager.stat_loggers if isinstance(s, metrics_bridge.TreeStatLogger)]
