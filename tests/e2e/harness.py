# SPDX-License-Identifier: Apache-2.0
"""What every end-to-end test shares: the target, its prompts, and pairs of engines."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.e2e.fork_server import REPO, run_forked, run_fresh
from tests.e2e.selector_head import selector_head

PROCESS = "tests.e2e.engine_process"
ENGINE_TIMEOUT_S = 1500

# Fixed: what is drafted must not depend on how fast the machine is just then.
_FIXED = {"num_speculative_tokens": 16, "tree_budget": 16, "max_step_rows": 512}
# Drafts of the head only.
_HEAD = {**_FIXED, "ngram_topk": 0}


def _head(kind: str) -> str:
    return str(REPO / "heads" / f"smollm2-135m-{kind}")


# Options of each method under test; the lossless matrix runs once per entry.
METHODS: dict[str, dict[str, Any]] = {
    "jetspec": {"method": "jetspec", "model": _head("jetspec"), **_HEAD},
    "ddtree": {"method": "ddtree", "model": _head("dflash"), **_HEAD},
    "dels": {
        "method": "dels",
        "model": _head("dflash"),
        "local_head": _head("dels-gru"),
        **_HEAD,
    },
    "longspec": {"method": "longspec", "model": _head("longspec"), **_HEAD},
    # Every context outgrows the partial cache; draft forwards always run.
    "tokenswift": {
        "method": "tokenswift",
        "model": _head("tokenswift"),
        "draft_source": "self",
        "kv_budget": 64,
        "self_draft_requests": 16,
        **_FIXED,
    },
    "eagle3_tree": {"method": "eagle3_tree", "model": _head("eagle3"), **_HEAD},
    "dspark_tree": {"method": "dspark_tree", "model": _head("dspark"), **_HEAD},
    "dflash2_tree": {"method": "dflash2_tree", "model": str(selector_head()), **_HEAD},
    "ngram_tree": {"method": "ngram_tree", **_FIXED},
}


# What users get: the same heads, and not one option beside them.
DEFAULTS: dict[str, dict[str, Any]] = {
    name: {key: options[key] for key in ("method", "model", "local_head") if key in options}
    for name, options in METHODS.items()
}


@cache
def target_path() -> str:
    """The prepared SmolLM2 target."""
    from vllm_specplug.targets import prepare_target

    return str(prepare_target("smollm2"))


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_path())


def chat_ids(text: str) -> list[int]:
    """Token ids of one user turn under the target's chat template."""
    return tokenizer().apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )


_TOPICS = (
    "a lighthouse", "prime numbers", "the water cycle", "a chess opening", "baking bread",
    "binary search", "the French Revolution", "photosynthesis", "a train timetable", "tides",
    "sorting a list", "a lost umbrella", "compound interest", "volcanoes", "the alphabet",
    "matrix multiplication", "a library card", "gravity", "a birthday party", "recursion",
    "the stock market", "a river journey", "Roman numerals", "a broken clock",
)  # fmt: skip
_FORMS = (
    "Explain {} to a child in a few sentences.",
    "Write a Python function about {} and comment every line.",
    "A shop sells items related to {}. Each costs 7 dollars and Ann buys 12. What does she pay?",
)


@cache
def prompts(count: int) -> list[list[int]]:
    """`count` tokenised prompts, taken in turn from chat, code and maths."""
    return [chat_ids(_FORMS[i % 3].format(_TOPICS[i // 3])) for i in range(count)]


def with_own_budgets(call: dict[str, Any], nodes: int = 8) -> dict[str, Any]:
    """The call with a fixed budget for every other request: drafts are certain, whatever the clock
    makes of the others."""
    count, params = len(call["prompts"]), call["params"]
    each = params if isinstance(params, list) else [params] * count
    own = {"specplug_tree_budget": nodes}
    return {
        **call,
        "params": [{**p, "extra_args": own} if i % 2 else p for i, p in enumerate(each)],
    }


@dataclass(frozen=True)
class EngineResult:
    """What one engine process produced."""

    calls: list[dict[str, Any]]
    counters: dict[str, float]

    @property
    def drafted(self) -> int:
        return int(self.counters.get("vllm:spec_decode_num_draft_tokens", 0))

    @property
    def accepted(self) -> int:
        return int(self.counters.get("vllm:spec_decode_num_accepted_tokens", 0))

    def call_counter(self, call: int, name: str) -> float:
        """How much a counter grew during one call."""
        before = self.calls[call - 1]["counters"].get(name, 0.0) if call else 0.0
        return float(self.calls[call]["counters"].get(name, 0.0) - before)

    def outputs(self, call: int = 0) -> list[dict[str, Any]]:
        """First completion of each request of one call."""
        return [completions[0] for completions in self.calls[call]["outputs"]]

    def token_ids(self, call: int = 0) -> list[list[int]]:
        return [output["token_ids"] for output in self.outputs(call)]


def engine_args(**overrides: Any) -> dict[str, Any]:
    """Arguments of a float32 engine on the target, small enough for two cores."""
    return {
        "model": target_path(),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "seed": 0,
        **overrides,
    }


def run_engine(
    engine: dict[str, Any],
    calls: list[dict[str, Any]],
    *,
    speculative: dict[str, Any] | None = None,
    sabotage: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    own_processes: bool = False,
    stock: bool = False,
    float32_states: bool = False,
) -> EngineResult:
    """Runs `calls` on an engine in a process of its own, once for the same job.

    A plain engine runs on the model runner that engines with trees have, with its kernels: the two
    then differ in speculation alone.

    Args:
        env: variables; without `own_processes` also such as vLLM reads while it is imported.
        own_processes: the engine and each of its workers have a process, as when serving; tensor
            parallelism needs it.
        stock: a plain engine runs as its users have it, on the model runner that vLLM takes.
        float32_states: with vLLM's CPU kernels for Gated DeltaNet in float32; see `hybrids`.

    Raises:
        AssertionError: with the end of the log when the process fails.
    """
    if speculative is not None:
        engine = {**engine, "speculative_config": speculative}
    job = json.dumps({"engine": engine, "calls": calls, "sabotage": sabotage,
                      "own_processes": own_processes, "stock": stock,
                      "float32_states": float32_states})  # fmt: skip
    if env:
        return _run_job(job, env, own_processes)
    return _shared_result(job, own_processes)


def dropped_blocks(options: dict[str, Any]) -> int:
    """Blocks of each prefix hit that a method has computed again."""
    from vllm_specplug.drafting.method import Capability
    from vllm_specplug.registry import get_method

    return int(Capability.NEXT_TOKENS in get_method(options["method"]).needs)


# Variables that count when an engine is built, not while vLLM is imported.
_READ_LATE = {"VLLM_PLUGINS"}


def _shared_result(job: str, own_processes: bool) -> EngineResult:
    """A job's result, made once for all tests and all workers of a run."""
    name = hashlib.sha256(job.encode()).hexdigest()
    path = Path(os.environ["SPECPLUG_TESTS_SHARED"], name)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            made = _run_job(job, None, own_processes)
            path.write_text(json.dumps([made.calls, made.counters]))
    return EngineResult(*json.loads(path.read_text()))


def _run_job(job: str, env: dict[str, str] | None, own_processes: bool) -> EngineResult:
    with tempfile.TemporaryDirectory() as folder:
        path, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log"))
        path.write_text(job)
        fresh = not own_processes and set(env or ()) - _READ_LATE
        run = run_fresh if fresh else run_forked
        if own_processes:
            env = {**(env or {}), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        code = run(PROCESS, [str(path), str(result)], log, env=env, timeout_s=ENGINE_TIMEOUT_S)
        if code != 0 or not result.is_file():
            raise AssertionError(f"engine process ended with {code}:\n{log.read_text()[-20000:]}")
        data = json.loads(result.read_text())
    return EngineResult(data["calls"], data["counters"])


def assert_drafted(result: EngineResult, least_acceptance: float = 0.02) -> None:
    """Fails where an equality would be empty: nothing drafted, or nothing accepted."""
    assert result.drafted > 0, "no draft was proposed"
    assert result.accepted > 0, "no draft was accepted"
    assert result.accepted / result.drafted > least_acceptance, (result.accepted, result.drafted)


def first_difference(expected: list[list[int]], actual: list[list[int]]) -> str | None:
    """Which request differs first and where; None when all are equal."""
    assert len(expected) == len(actual)
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        if a != b:
            at = next(
                (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)),
            )
            return f"request {i} differs at token {at}: {a[at : at + 6]} != {b[at : at + 6]}"
    return None
