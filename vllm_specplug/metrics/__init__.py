# SPDX-License-Identifier: Apache-2.0
"""Metrics of trees: counters under `specplug:`, one log line per interval, a watchdog.

vLLM serves /metrics from the API server process, but trees are verified in a worker process,
possibly on another node. The plugin's statistics travel with vLLM's own:

    worker        runner adds to a `StepStats`; at the end of a step `SpecPlugMetrics.end_step()`
                  drains it into a payload of plain data, which the runner adds to its
                  `ModelRunnerOutput` (drafting/step_report.py)
    engine core   the scheduler's `update_from_output` moves the payload to the `SchedulerStats` it
                  returns (engine/step_reports.py)
    API server    a stat logger hands the payload to `PrometheusExporter.observe`, which owns the
                  counters (engine/metrics_bridge.py)

So the metrics carry vLLM's labels `model_name` and `engine`, and work with several nodes, data
parallel engines and several API servers, as vLLM's counters do. The log line and the watchdog are
in the worker.

Rejected: prometheus_client's multiprocess mode (it must be enabled before anything imports the
library, and then changes all of vLLM's metrics); a shared file (one node only, and missing from
the registry of a server with several API processes); a separate port (one more thing to scrape and
secure); a plugin of the group `vllm.stat_logger_plugins` (installing this package would enable
statistics for all engines).
"""
