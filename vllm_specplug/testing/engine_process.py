# SPDX-License-Identifier: Apache-2.0
"""Runs engines one after another: `python -m vllm_specplug.testing.engine_process JOB RESULT`.

Each engine is in a fork, so the plain engine is not affected by what a tree worker registers.
Importing vLLM takes longer than building a small engine, so it is imported once, before the forks.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

ENGINE_TIMEOUT_S = 900


def main(job_path: str, result_path: str) -> None:
    """Runs the calls of a job on each of its engines; writes their outputs and counters as JSON."""
    importlib.import_module("vllm.v1.engine.llm_engine")
    job = json.loads(Path(job_path).read_text())
    results = []
    for engine in job["engines"]:
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(engine, job["calls"], result_path)
        )
        process.start()
        process.join(ENGINE_TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            sys.exit(f"an engine took more than {ENGINE_TIMEOUT_S} s")
        if process.exitcode:
            sys.exit(process.exitcode)
        results.append(json.loads(Path(result_path).read_text()))
    Path(result_path).write_text(json.dumps(results))


def _run(engine: dict[str, Any], calls: list[dict[str, Any]], result_path: str) -> None:
    from vllm import LLM, SamplingParams

    importlib.import_module("vllm_specplug.vllm_v2.plain_engine").use_v2()
    llm = LLM(disable_log_stats=False, **engine)
    results, before = [], _counters(llm)
    for call in calls:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in call["prompts"]],  # type: ignore[arg-type]
            [SamplingParams(**params) for params in call["params"]],
            use_tqdm=False,
        )
        after = _counters(llm)
        results.append(
            {
                "token_ids": [list(request.outputs[0].token_ids) for request in outputs],
                "counters": {name: after[name] - before.get(name, 0.0) for name in after},
            }
        )
        before = after
    Path(result_path).write_text(json.dumps(results))


def _counters(llm: Any) -> dict[str, float]:
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            values[metric.name] = values.get(metric.name, 0.0) + metric.value
    return values


if __name__ == "__main__":
    main(*sys.argv[1:])
