# SPDX-License-Identifier: Apache-2.0
"""Runs one engine in a process of its own: `python e2e_engine.py JOB.json RESULT.json`.

The job has the engine's arguments, perhaps speculative options, and a list of calls of equal
requests, greedy or with `sampling`; the result has seconds, tokens and drafts of each call, and,
for calls that ask for it, milliseconds of each phase of a step with the device waited for in
between.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One process, so that phases can be timed from here.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

PHASES = ("execute_model", "_sample", "propose_draft_token_ids")
_times: dict[str, list[float]] = defaultdict(list)
_timing = False


def _time_phases(runner: Any) -> None:
    """Wraps the runner's phases; a phase waits for the device before and after."""
    is_v2 = hasattr(runner, "speculator")
    owners = {name: (runner, name) for name in PHASES}
    if is_v2:
        owners["_sample"] = runner, "sample"
        owners["propose_draft_token_ids"] = runner.speculator, "propose"
    wait = _wait if is_v2 else runner._sync_device
    for name, (owner, method) in owners.items():
        original = getattr(owner, method)

        def timed(*args: Any, _original=original, _name=name, **kwargs: Any) -> Any:
            if not _timing:
                return _original(*args, **kwargs)
            wait()
            start = time.perf_counter()
            result = _original(*args, **kwargs)
            wait()
            _times[_name].append(1e3 * (time.perf_counter() - start))
            return result

        setattr(owner, method, timed)


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _model_runner(llm: Any) -> Any:
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    worker = executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def _counter(llm: Any, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name and hasattr(m, "value"))


def main(job_path: str, result_path: str) -> None:
    global _timing
    job = json.loads(Path(job_path).read_text())
    if job["engine"].get("dtype") == "float32":
        # vLLM's own Triton attention would multiply in TF32.
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    engine = dict(job["engine"])
    if job.get("speculative"):
        engine["speculative_config"] = job["speculative"]
    llm = LLM(disable_log_stats=False, seed=0, **engine)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - started, "calls": []}
    try:
        _time_phases(_model_runner(llm))
        can_time = True
    except AttributeError as error:
        result["phases_unavailable"] = str(error)
        can_time = False
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    for call in job["calls"]:
        params = SamplingParams(
            detokenize=False, ignore_eos=call.get("ignore_eos", True), max_tokens=call["tokens"],
            extra_args=call.get("extra_args"), **(call.get("sampling") or {"temperature": 0.0}),
        )  # fmt: skip
        prompts = call.get("prompts") or [
            [(7919 * (i + 1) * (j + 1) + i) % (vocab - 10) + 5 for j in range(call["context"])]
            for i in range(call["batch"])
        ]
        prompts = [{"prompt_token_ids": ids} for ids in prompts]
        one = SamplingParams(temperature=0.0, detokenize=False, ignore_eos=True, max_tokens=1)
        llm.generate(prompts, one, use_tqdm=False)  # prefill once: prefix hits after that
        start = time.perf_counter()
        llm.generate(prompts, one, use_tqdm=False)
        first = time.perf_counter() - start
        drafts = _counter(llm, "vllm:spec_decode_num_drafts")
        accepted = _counter(llm, "vllm:spec_decode_num_accepted_tokens")
        _times.clear()
        _timing = bool(call.get("phases")) and can_time
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        _timing = False
        # Prompt steps and the first ones of a shape are not what is asked for.
        phases = {n: median(t[len(t) // 4 :]) for n, t in _times.items() if len(t) >= 4}
        result["calls"].append(
            {
                **{k: v for k, v in call.items() if k != "prompts"},
                "seconds": seconds,
                "first_token_seconds": first,
                "generated": sum(len(o.outputs[0].token_ids) for o in outputs),
                "drafts": _counter(llm, "vllm:spec_decode_num_drafts") - drafts,
                "accepted": _counter(llm, "vllm:spec_decode_num_accepted_tokens") - accepted,
                "phases_ms": phases,
                "token_ids": [list(o.outputs[0].token_ids) for o in outputs]
                if call.get("keep_tokens")
                else None,
            }
        )
        Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
