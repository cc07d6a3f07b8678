# SPDX-License-Identifier: Apache-2.0
"""What trees do at run time: counters under `specplug:`, one log line per interval, a watchdog.

How a number gets from the model runner to /metrics. vLLM serves /metrics from the API server
process, while drafts, walks and compactions happen in a worker process, possibly on another node.
vLLM's own statistics have the same problem and a channel for it, so the plugin's travel with them:

    worker        runner adds to a `StepStats`; at the end of a step `SpecPlugMetrics.end_step()`
                  drains it into a payload of plain ints, floats, lists and dicts, which the runner
                  sets as attribute `specplug_stats` of its `ModelRunnerOutput`
    engine core   the scheduler's `update_from_output` moves the payload to the `SchedulerStats` it
                  returns (engine/metrics_bridge.py)
    API server    a stat logger hands the payload to `PrometheusExporter.observe`, which owns the
                  counters (engine/metrics_bridge.py)

Every process that holds a front end thus has ordinary prometheus_client metrics with vLLM's labels
`model_name` and `engine`; several nodes, data parallel engines and several API servers work because
they work for vLLM's counters. A payload that gets lost costs numbers, never tokens.

Rejected: prometheus_client's multiprocess mode (it must be switched on before anything imports the
library, and then changes all of vLLM's metrics); a file shared by the processes (one node only,
and missing from the registry of a server with several API processes); a separate port (one more
thing to scrape, secure and document); a plugin of the group `vllm.stat_logger_plugins` (its mere
presence switches statistics on for everyone who installed this package).

The log line and the watchdog need no channel: both live in the worker, where the numbers are.
"""

from vllm_specplug.metrics.exporter import PrometheusExporter
from vllm_specplug.metrics.step_stats import PHASES, PLAIN_REASONS, StepStats
from vllm_specplug.metrics.watchdog import AcceptanceWatchdog
from vllm_specplug.metrics.worker_metrics import (
    STATS_ATTRIBUTE,
    SpecPlugMetrics,
    format_interval,
)

__all__ = [
    "PHASES",
    "PLAIN_REASONS",
    "STATS_ATTRIBUTE",
    "AcceptanceWatchdog",
    "PrometheusExporter",
    "SpecPlugMetrics",
    "StepStats",
    "format_interval",
]
