# SPDX-License-Identifier: Apache-2.0
"""Runs one engine in a process of its own; `run_engine` in harness.py starts it.

The job names the engine's arguments and a list of calls; the result holds every output and
the speculative counters. Separate processes keep engines apart: what a tree worker registers in
one cannot reach the plain engine it is compared with.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from tests.e2e.sabotage import sabotage

_kept: list[Any] = []


def _adapters(adapters: list[Any] | None) -> list[Any] | None:
    """(name, id, folder) of each prompt's LoRA adapter, None for none."""
    if adapters is None:
        return None
    from vllm.lora.request import LoRARequest

    return [None if adapter is None else LoRARequest(*adapter) for adapter in adapters]


def fork_workers() -> None:
    """Lets the engine and its workers be forks of this process: vLLM's CPU build spawns them, and
    then each imports all of vLLM again."""
    import multiprocessing

    from vllm.utils import system_utils

    fork = multiprocessing.get_context("fork")
    system_utils.multiprocessing = SimpleNamespace(
        **{**vars(multiprocessing), "get_context": lambda method: fork}
    )


def _counters(llm: Any) -> dict[str, float]:
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            values[metric.name] = values.get(metric.name, 0.0) + metric.value
    return values


def _params(spec: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    spec = dict(spec)
    if "structured_outputs" in spec:
        spec["structured_outputs"] = StructuredOutputsParams(**spec["structured_outputs"])
    return SamplingParams(**spec)


def _output(completion: Any) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": None
        if logprobs is None
        else [{str(t): p.logprob for t, p in step.items()} for step in logprobs],
    }


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    if "speculative_config" not in job["engine"] and not job.get("stock"):
        # On the runner that trees have.
        from vllm_specplug.vllm_v2.plain_engine import use_v2

        use_v2()
    if job.get("float32_states"):
        from tests.e2e.hybrids import use_float32_states

        use_float32_states()
    for name in job.get("sabotage", ()):
        sabotage(name)
    from vllm import LLM

    if job["own_processes"]:
        fork_workers()
    llm = LLM(disable_log_stats=False, **job["engine"])
    # This process ends without exit handlers, so that the engine need not be taken apart.
    _kept.append(llm)
    results = []
    for call in job["calls"]:
        params = call["params"]
        start = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in call["prompts"]],
            [_params(p) for p in params] if isinstance(params, list) else _params(params),
            lora_request=_adapters(call.get("adapters")),
            use_tqdm=False,
        )
        results.append(
            {
                "outputs": [[_output(c) for c in request.outputs] for request in outputs],
                "seconds": time.perf_counter() - start,
                # Since the engine started.
                "counters": _counters(llm),
            }
        )
    Path(result_path).write_text(json.dumps({"calls": results, "counters": _counters(llm)}))
    if job["own_processes"]:
        # Its processes must end. vLLM looks at processes that it is about to kill, and on a busy
        # machine they are gone by then.
        with suppress(psutil.NoSuchProcess):
            llm.llm_engine.engine_core.shutdown()
