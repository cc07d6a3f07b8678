# SPDX-License-Identifier: Apache-2.0
"""The plugin installed but not chosen changes nothing: neither tokens nor metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, run_engine
from tests.e2e.tiny import make_text_target

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("harmless")]

SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True},
    {"temperature": 0.9, "seed": 1, "max_tokens": 40, "ignore_eos": True},
    {"temperature": 0.0, "max_tokens": 40, "presence_penalty": 0.6, "logprobs": 2},
    {"temperature": 0.0, "max_tokens": 40, "structured_outputs": {"regex": "[a-z ]{8,30}"}},
    {"temperature": 0.0, "max_tokens": 24, "min_tokens": 9, "stop": ["a", "e"]},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_target(tmp_path_factory.mktemp("harmless") / "target")


def _run(target: Path, method: str, env: dict[str, str]) -> EngineResult:
    engine = {
        "model": str(target),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        # One at a time: when a grammar is ready decides which requests share a step, and so rounds
        # differently from run to run, with or without the plugin.
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": True,
    }
    prompts = [[40, 41, 42, 43] * 4, [60, 61, 62], [100, 9, 100, 9], [7], [33, 34, 35, 33, 34]]
    # Under speculation of its own, vLLM draws a seeded request differently from run to run.
    params = [p for p in PARAMS if SPECULATIVE[method] is None or "seed" not in p]
    calls = [{"prompts": prompts[: len(params)], "params": params}] * 2
    return run_engine(engine, calls, speculative=SPECULATIVE[method], env=env, stock=True)


@pytest.mark.parametrize("method", ["plain", pytest.param("ngram", marks=pytest.mark.full)])
def test_tokens_and_metrics_are_those_without_the_plugin(target: Path, method: str) -> None:
    without = _run(target, method, {"VLLM_PLUGINS": "none"})
    installed = _run(target, method, {})
    for call in range(2):
        for a, b in zip(installed.outputs(call), without.outputs(call), strict=True):
            expected, actual = b.pop("logprobs") or [], a.pop("logprobs") or []
            assert a == b
            for x, y in zip(expected, actual, strict=True):
                assert x == pytest.approx(y, abs=1e-4)
    assert set(installed.counters) == set(without.counters)
    assert not [name for name in installed.counters if name.startswith("specplug")]
    # Counters of events, not of time, agree to the unit.
    for name in ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prefix_cache_hits"):
        assert installed.counters[name] == without.counters[name]
    if method == "ngram":
        assert (installed.drafted, installed.accepted) == (without.drafted, without.accepted)
        assert installed.drafted > 0
