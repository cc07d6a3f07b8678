# SPDX-License-Identifier: Apache-2.0
"""Runs one engine in a process: `python -m vllm_specplug.testing.engine_process JOB RESULT`.

In a process of its own, the plain engine is not affected by what a tree worker registers.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main(job_path: str, result_path: str) -> None:
    """Runs the calls of a job on one engine and writes outputs and counters as JSON."""
    from vllm import LLM, SamplingParams

    importlib.import_module("vllm_specplug.vllm_v2.plain_engine").use_v2()
    job = json.loads(Path(job_path).read_text())
    llm = LLM(disable_log_stats=False, **job["engine"])
    results, before = [], _counters(llm)
    for call in job["calls"]:
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
