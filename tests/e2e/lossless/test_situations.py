# SPDX-License-Identifier: Apache-2.0
"""float32 greedy output is token-identical to plain vLLM, in each situation by itself.

Every test compares two engines that differ only in speculation, and fails as well when
nothing was drafted or accepted. `make test` has all of it on one engine per method, in
test_lossless.py; this is for `make test-full`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from tests.e2e.harness import (
    METHODS,
    EngineResult,
    assert_drafted,
    dropped_blocks,
    engine_args,
    first_difference,
    prompts,
    run_engine,
)

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@dataclass(frozen=True)
class Situation:
    """Engine arguments and the calls made on them."""

    engine: dict[str, Any]
    calls: list[dict[str, Any]]
    speculative: dict[str, Any] = field(default_factory=dict)
    preempts: bool = False


def _greedy(max_tokens: int, **params: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": max_tokens, **params}


def _calls(count: int, params: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"prompts": [list(p) for p in prompts(count)], "params": params}]


def _one_by_one() -> Situation:
    ids = prompts(64)
    return Situation(
        engine_args(max_num_seqs=1),
        [{"prompts": [list(p) for p in ids], "params": _greedy(24)}],
    )


def _mixed_batch() -> Situation:
    # A small token budget: prompts are cut into chunks and share steps with decoding requests.
    return Situation(
        engine_args(max_num_batched_tokens=320, max_num_seqs=16),
        _calls(64, _greedy(32)),
        {"max_step_rows": 160},
    )


def _preemption() -> Situation:
    return Situation(
        engine_args(num_gpu_blocks_override=26, block_size=32, max_model_len=512),
        [
            {
                "prompts": [list(p) for p in prompts(64) if len(p) < 160][:12],
                "params": _greedy(96, ignore_eos=True),
            }
        ],
        preempts=True,
    )


def _prefix_cache() -> Situation:
    # The second call repeats prompts; the third continues what the first must have generated.
    ids = [list(p) for p in prompts(8)]
    return Situation(
        engine_args(enable_prefix_caching=True, block_size=32),
        [
            {"prompts": ids, "params": _greedy(80, ignore_eos=True)},
            {"prompts": ids, "params": _greedy(80, ignore_eos=True)},
        ],
    )


def _block_size(size: int) -> Situation:
    return Situation(engine_args(block_size=size), _calls(16, _greedy(40)))


def _near_max_model_len() -> Situation:
    # The longest prompts that fit: every request runs into the end of its context.
    fitting = sorted((p for p in prompts(48) if len(p) <= 190), key=len, reverse=True)
    ids = [list(p) for p in fitting[:8]]
    return Situation(
        engine_args(max_model_len=200),
        [{"prompts": ids, "params": _greedy(200, ignore_eos=True)}],
    )


def _stops() -> Situation:
    ids = [list(p) for p in prompts(16)]
    kinds = [
        {"stop": [" the"]},
        {"stop": ["\n\n"], "include_stop_str_in_output": True},
        {"stop_token_ids": [28, 30]},
        {"min_tokens": 20},
        {"min_tokens": 12, "stop_token_ids": [28]},
    ]
    params = [_greedy(21 + 3 * i, **kinds[i % len(kinds)]) for i in range(16)]
    return Situation(engine_args(), [{"prompts": ids, "params": params}])


def _penalties() -> Situation:
    kinds = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"bad_words": [" the", " of"]},
        # As many as the runner takes.
        {"allowed_token_ids": list(range(0, 49152, 48))},
        {},
    ]
    params = [_greedy(40, **kinds[i % len(kinds)]) for i in range(15)]
    return Situation(engine_args(), _calls(15, params))


def _seeded_sampling() -> Situation:
    params = [
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": i, "max_tokens": 32}
        for i in range(16)
    ]
    return Situation(engine_args(max_num_batched_tokens=512), _calls(16, params))


def _json_schema() -> Situation:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    params = [
        _greedy(64, structured_outputs={"json": schema}) if i % 2 == 0 else _greedy(48)
        for i in range(8)
    ]
    return Situation(engine_args(), _calls(8, params))


SITUATIONS = {
    "one_by_one": _one_by_one,
    "mixed_batch": _mixed_batch,
    "preemption": _preemption,
    "prefix_cache": _prefix_cache,
    "block_size_32": lambda: _block_size(32),
    "block_size_64": lambda: _block_size(64),
    "block_size_128": lambda: _block_size(128),
    "near_max_model_len": _near_max_model_len,
    "stops": _stops,
    "penalties": _penalties,
    "seeded_sampling": _seeded_sampling,
    "logprobs": lambda: Situation(engine_args(), _calls(8, _greedy(32, logprobs=3))),
    "json_schema": _json_schema,
    "control": lambda: Situation(engine_args(), _calls(16, _greedy(48, ignore_eos=True))),
}


@cache
def _plain(name: str) -> EngineResult:
    """Plain decoding of one situation, run once for all methods."""
    situation = SITUATIONS[name]()
    return run_engine(situation.engine, situation.calls)


def _compare(name: str, method: str) -> tuple[Situation, EngineResult, EngineResult]:
    situation = SITUATIONS[name]()
    tree = run_engine(
        situation.engine,
        situation.calls,
        speculative={**METHODS[method], **situation.speculative},
    )
    return situation, _plain(name), tree


# These share the runner with jetspec; these situations are where they could differ.
_SITUATIONS_OF = {
    "jetspec_ngrams": {"mixed_batch", "preemption", "prefix_cache", "stops", "seeded_sampling"},
    "ddtree": {"mixed_batch"},
    "dels": {"mixed_batch", "preemption", "prefix_cache", "stops", "seeded_sampling"},
    "longspec": {"mixed_batch", "preemption", "prefix_cache"},
    "tokenswift": {"preemption", "prefix_cache"},
    "eagle3_tree": {"preemption", "prefix_cache"},
    "dspark_tree": {"mixed_batch"},
    "dflash2_tree": {"mixed_batch"},
    "ngram_tree": {"mixed_batch", "preemption", "prefix_cache"},
}
# `ngram_tree` drafts too seldom in short answers for these tests. The drafters of ddtree,
# dspark_tree and dflash2_tree are jetspec's.
HEAD_METHODS = ["jetspec", "jetspec_ngrams"]
_LIKE_JETSPEC = ("ddtree", "dspark_tree", "dflash2_tree")
CACHE_METHODS = [name for name in METHODS if name not in _LIKE_JETSPEC]
_MATRIX = [
    pytest.param(name, method, marks=pytest.mark.xdist_group(name))
    for name in SITUATIONS
    if name not in ("logprobs", "json_schema", "control")
    for method in METHODS
    if method == "jetspec" or name in _SITUATIONS_OF[method]
]


@pytest.mark.parametrize(("name", "method"), _MATRIX)
def test_output_equals_plain_decoding(name: str, method: str) -> None:
    situation, plain, tree = _compare(name, method)
    for call in range(len(situation.calls)):
        difference = first_difference(plain.token_ids(call), tree.token_ids(call))
        assert difference is None, difference
        for a, b in zip(plain.outputs(call), tree.outputs(call), strict=True):
            assert (a["text"], a["finish_reason"], a["stop_reason"]) == (
                b["text"],
                b["finish_reason"],
                b["stop_reason"],
            )
    assert_drafted(tree)
    if situation.preempts:
        assert tree.preemptions > 0 and plain.preemptions > 0
    if situation.engine["enable_prefix_caching"]:
        assert tree.counters["vllm:prefix_cache_hits"] > 0


@pytest.mark.xdist_group("prefix_cache")
@pytest.mark.parametrize("method", CACHE_METHODS)
def test_continues_generated_text_from_the_prefix_cache(method: str) -> None:
    ids = [list(p) for p in prompts(8)]
    engine = engine_args(enable_prefix_caching=True, block_size=32)
    # What the first call generates is what the second call's prompts continue.
    generated = _plain("prefix_cache").token_ids()
    longer = [p + out for p, out in zip(ids, generated, strict=True)]
    calls = [
        {"prompts": ids, "params": _greedy(80, ignore_eos=True)},
        {"prompts": longer, "params": _greedy(32, ignore_eos=True)},
    ]
    plain = run_engine(engine_args(), calls[1:])
    tree = run_engine(engine, calls, speculative=METHODS[method])
    assert first_difference(generated, tree.token_ids(0)) is None
    difference = first_difference(plain.token_ids(0), tree.token_ids(1))
    assert difference is None, difference
    assert_drafted(tree)
    # Blocks that hold generated tokens were hit: more than the prompts alone could give.
    prompt_blocks = sum(len(p) // 32 * 32 for p in ids)
    hits = tree.counters["vllm:prefix_cache_hits"] + 8 * 32 * dropped_blocks(METHODS[method])
    assert hits > prompt_blocks


@pytest.mark.xdist_group("control")
@pytest.mark.parametrize("method", HEAD_METHODS)
def test_without_compaction_outputs_diverge(method: str) -> None:
    """The negative control: these comparisons can tell a corrupted cache."""
    situation = SITUATIONS["control"]()
    broken = run_engine(
        situation.engine, situation.calls, speculative=METHODS[method], sabotage=("compaction",)
    )
    plain = _plain("control").token_ids()
    equal = sum(a == b for a, b in zip(plain, broken.token_ids(), strict=True))
    assert equal <= len(plain) // 2, f"{equal} of {len(plain)} outputs survived"


@pytest.mark.xdist_group("logprobs")
@pytest.mark.parametrize("method", HEAD_METHODS)
def test_logprobs_equal_plain_decoding(method: str) -> None:
    _, plain, tree = _compare("logprobs", method)
    assert first_difference(plain.token_ids(), tree.token_ids()) is None
    for a, b in zip(plain.outputs(), tree.outputs(), strict=True):
        assert len(a["logprobs"]) == len(a["token_ids"]) == len(b["logprobs"])
        for expected, actual in zip(a["logprobs"], b["logprobs"], strict=True):
            common = set(expected) & set(actual)
            assert len(common) >= 3
            assert all(abs(expected[t] - actual[t]) < 1e-3 for t in common)
    assert_drafted(tree)


@pytest.mark.xdist_group("json_schema")
@pytest.mark.parametrize("method", HEAD_METHODS)
def test_json_schema_requests_equal_plain_decoding(method: str) -> None:
    _, plain, tree = _compare("json_schema", method)
    assert first_difference(plain.token_ids(), tree.token_ids()) is None
    assert_drafted(tree)
