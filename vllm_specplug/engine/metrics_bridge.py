# SPDX-License-Identifier: Apache-2.0
"""Carries a step's statistics from the runner's output to /metrics.

Seam: metrics_bridge.

A worker process makes the numbers, and the API server's process exports them. vLLM's channel
between the two has no field for plugins: the front end decodes by declared type and drops
everything else. Its plugin group for stat loggers covers only the receiving end, and switches
statistics on for servers that do not use our methods.

The front end's decoder caches the types of `EngineCoreOutputs` when it is built, so the seams must
be applied before an engine client exists. The plugin's entry point ensures it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from vllm_specplug.engine.spec_config import tree_config
from vllm_specplug.metrics.exporter import PrometheusExporter


@dataclass
class TreeSchedulerStats(SchedulerStats):
    """vLLM's statistics of a step with those of the plugin."""

    # Payload of metrics.StepStats
    specplug_stats: dict[str, Any] | None = None


def replace_annotations(stock: dict[str, Any]) -> dict[str, Any]:
    """The declared types of `EngineCoreOutputs`, with the plugin's statistics."""
    return {**stock, "scheduler_stats": TreeSchedulerStats | None}


class TreeStatLogger(AggregateStatLoggerBase):
    """Counts the statistics in the front end, with one set of labels per engine."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        model_name = str(vllm_config.model_config.served_model_name)
        self._exporters = {
            index: PrometheusExporter({"model_name": model_name, "engine": str(index)})
            for index in engine_indexes
        }

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        payload = getattr(scheduler_stats, "specplug_stats", None)
        exporter = self._exporters.get(engine_idx)
        if payload is not None and exporter is not None:
            exporter.observe(payload)

    def log_engine_initialized(self) -> None:
        pass


def attach_stats(outputs: dict[int, EngineCoreOutputs], payload: dict[str, Any]) -> None:
    """Adds `payload` to the output that carries scheduler statistics.

    Without such an output (statistics are switched off) it is dropped.
    """
    for output in outputs.values():
        stats = output.scheduler_stats
        if stats is not None:
            output.scheduler_stats = TreeSchedulerStats(**vars(stats), specplug_stats=payload)
            return


def wrap_stat_logger_manager(original: Callable[..., None]) -> Callable[..., None]:
    """`StatLoggerManager.__init__`, which adds a logger if the engine runs one of our methods."""

    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if tree_config(vllm_config) is not None:
            self.stat_loggers.append(TreeStatLogger(vllm_config, self.engine_indexes))

    return init
