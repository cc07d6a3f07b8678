# SPDX-License-Identifier: Apache-2.0
"""float32 output of every method is token-identical to plain vLLM, greedy and seeded.

The real target and the heads that come with the project. One engine of each configuration gets
everything that a server gets: prompts cut into chunks beside decoding requests, a cache too small
for them, prefixes it has generated itself, all kinds of parameters. Plain engines run on the model
runner that trees have; greedy tokens are also compared with those of the one that vLLM takes by
itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.e2e.harness import (
    DEFAULTS,
    METHODS,
    EngineResult,
    assert_drafted,
    dropped_blocks,
    engine_args,
    first_difference,
    prompts,
    run_engine,
    with_own_budgets,
)

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 448
BLOCK = 32
# Tokens that the calls "long" and "first" generate; "continued" goes on after the latter.
LONG, FIRST, CONTINUED = 48, 34, 12
CALLS = ("options", "long", "first", "continued")
# Prompts of those calls. More options than run at once: prompts join requests that decode.
NUM_LONG, NUM_FIRST = 6, 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _ids(count: int, start: int = 0) -> list[list[int]]:
    return prompts(start + count)[start:]


def _greedy(max_tokens: int, **params: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": max_tokens, **params}


def _seeded(seed: int, **params: Any) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": seed, "max_tokens": 24, **params}


OPTIONS: list[dict[str, Any]] = [
    _greedy(21, stop=[" the"]),
    _greedy(24, stop=["\n\n"], include_stop_str_in_output=True),
    _greedy(27, stop_token_ids=[28, 30], min_tokens=12),
    _greedy(24, repetition_penalty=1.3),
    _greedy(24, presence_penalty=0.7, frequency_penalty=0.4),
    _greedy(24, bad_words=[" the", " of"]),
    # As many as the runner takes.
    _greedy(24, allowed_token_ids=list(range(0, 49152, 48))),
    _greedy(24, logprobs=3),
    _greedy(40, structured_outputs={"json": SCHEMA}),
    _seeded(0, top_p=0.9, top_k=40),
    _seeded(1),
    _seeded(2, presence_penalty=0.5),
]


def _calls() -> list[dict[str, Any]]:
    """The calls of `CALLS` but the last, which continues what was generated."""
    return [
        {"prompts": _ids(len(OPTIONS), start=4), "params": OPTIONS},
        {"prompts": _ids(NUM_LONG), "params": _greedy(LONG, ignore_eos=True)},
        {"prompts": _ids(NUM_FIRST), "params": _greedy(FIRST, ignore_eos=True)},
    ]


def _plain(stock: bool = False) -> EngineResult:
    """Plain decoding, with room for everything."""
    engine = engine_args(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=8192)
    return run_engine(engine, _calls()[:2], stock=stock)


def _expected() -> dict[str, list[dict[str, Any]]]:
    """Outputs by call; "first" and "continued" are parts of "long"."""
    plain = _plain()
    by_call = {name: plain.outputs(i) for i, name in enumerate(CALLS[:2])}
    long = [o["token_ids"] for o in by_call["long"][:NUM_FIRST]]
    by_call["first"] = [{"token_ids": ids[:FIRST]} for ids in long]
    by_call["continued"] = [{"token_ids": ids[FIRST : FIRST + CONTINUED]} for ids in long]
    return by_call


def _tree_engine() -> dict[str, Any]:
    return engine_args(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=320,
        block_size=BLOCK,
        # The long answers do not fit.
        num_gpu_blocks_override=17,
        enable_prefix_caching=True,
        long_prefill_token_threshold=48,
    )


CONFIGURATIONS = {
    **{f"{name}_fixed": options for name, options in METHODS.items()},
    **{f"{name}_default": options for name, options in DEFAULTS.items()},
}
# Defaults in every run; of the methods that draft with a block head, one.
_IN_EVERY_RUN = {f"{name}_default" for name in DEFAULTS}
_IN_EVERY_RUN -= {f"{name}_default" for name in ("ddtree", "dels", "dspark_tree", "dflash2_tree")}


def _by_tier(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=() if n in _IN_EVERY_RUN else pytest.mark.full) for n in names]


@pytest.mark.parametrize("name", _by_tier(CONFIGURATIONS))
def test_output_equals_plain_decoding(name: str) -> None:
    _check(name, _tree(name))


# `make test` compares both schedulers on a small target (test_steps.py).
@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_output_equals_plain_decoding_scheduled_ahead(name: str) -> None:
    _check(name, _tree(name, async_scheduling=True))


# Methods whose drafts read KV caches of target layers, some of which are on the other stage.
_OF_ONE_STAGE = {"longspec", "tokenswift"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "jetspec_default" else pytest.mark.full)
        for name in CONFIGURATIONS
        if name.rpartition("_")[0] not in _OF_ONE_STAGE
    ],
)
def test_output_equals_plain_decoding_over_two_stages(name: str) -> None:
    """The last stage drafts. The first stage takes over its trees two steps later."""
    _check(name, _tree(name, pipeline_parallel_size=2))


@pytest.mark.parametrize("name", _by_tier(f"{name}_default" for name in DEFAULTS))
def test_greedy_output_is_that_of_the_runner_vllm_takes(name: str) -> None:
    """Plain vLLM as its users have it, on the other model runner and with its kernels."""
    stock, tree = _plain(stock=True), _tree(name)
    for i, call in enumerate(_calls()[:2]):
        each = call["params"] if isinstance(call["params"], list) else [call["params"]]
        each = each * (len(call["prompts"]) // len(each))
        greedy = [k for k, params in enumerate(each) if not params["temperature"]]
        expected, actual = stock.token_ids(i), tree.token_ids(i)
        difference = first_difference([expected[k] for k in greedy], [actual[k] for k in greedy])
        assert difference is None, f"{CALLS[i]}: {difference}"
    assert_drafted(tree, least_acceptance=0.0)


def _tree(name: str, **engine: Any) -> EngineResult:
    """All of `CALLS` with trees."""
    first = _expected()["first"]
    calls = [
        *_calls(),
        {
            "prompts": [p + o["token_ids"] for p, o in zip(_ids(NUM_FIRST), first, strict=True)],
            "params": _greedy(CONTINUED, ignore_eos=True),
        },
    ]
    if "tree_budget" not in CONFIGURATIONS[name]:
        calls = [with_own_budgets(call) for call in calls]
    return run_engine(
        {**_tree_engine(), **engine}, calls, speculative=CONFIGURATIONS[name],
        own_processes="pipeline_parallel_size" in engine,
    )  # fmt: skip


def _check(name: str, tree: EngineResult) -> None:
    expected = _expected()
    for i, call in enumerate(CALLS):
        wanted = [o["token_ids"] for o in expected[call]]
        difference = first_difference(wanted, tree.token_ids(i))
        assert difference is None, f"{call}: {difference}"
        for a, b in zip(expected[call], tree.outputs(i), strict=True):
            for key in {"text", "finish_reason", "stop_reason"} & set(a):
                assert a[key] == b[key], (call, key)
            _assert_close_logprobs(a.get("logprobs"), b["logprobs"])
        drafted = tree.call_counter(i, "vllm:spec_decode_num_draft_tokens")
        # Looking up finds something in every longer answer, if not in every short one.
        assert drafted > 0 or call == "continued", f"{call}: no draft was proposed"
    assert_drafted(tree, least_acceptance=0.0)
    assert tree.call_counter(CALLS.index("long"), "vllm:num_preemptions") > 0
    # Blocks that hold generated tokens were hit: more than the prompts alone could give.
    hits = tree.call_counter(CALLS.index("continued"), "vllm:prefix_cache_hits")
    hits += NUM_FIRST * BLOCK * dropped_blocks(CONFIGURATIONS[name])
    assert hits > sum(len(p) // BLOCK * BLOCK for p in _ids(NUM_FIRST))


def _assert_close_logprobs(a: Any, b: Any) -> None:
    assert (a is None) == (b is None) or a is None
    for expected, actual in zip(a or (), b or (), strict=a is not None):
        common = set(expected) & set(actual)
        assert len(common) >= 3
        assert all(abs(expected[t] - actual[t]) < 1e-3 for t in common)


def test_without_compaction_outputs_diverge() -> None:
    """The negative control: these comparisons can tell a corrupted cache."""
    call = _calls()[CALLS.index("long")]
    broken = run_engine(
        engine_args(max_model_len=MAX_MODEL_LEN),
        [call],
        speculative=METHODS["jetspec"],
        sabotage=("compaction",),
    )
    plain = _plain().token_ids(CALLS.index("long"))
    equal = sum(a == b for a, b in zip(plain, broken.token_ids(), strict=True))
    assert equal <= len(plain) // 2, f"{equal} of {len(plain)} outputs survived"
