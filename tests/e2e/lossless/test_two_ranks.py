# SPDX-License-Identifier: Apache-2.0
"""Two tensor parallel ranks use the first rank's trees and clock; for pipeline stages see
test_pipeline.py.

The second rank drafts other trees and has its own clock, so the ranks agree only through what they
exchange.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine, with_own_budgets
from tests.e2e.own_schedulers import run_ranks
from tests.e2e.tiny import (
    make_adapter,
    make_eagle3_head,
    make_head,
    make_local_head,
    make_longspec_head,
    make_target,
    make_text_target,
    make_tokenswift_heads,
)
from tests.e2e.tiny_engine import CALLS, PROMPTS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("two_ranks")]

# What ranks share differs: states of layers and tables, or also a forward of the target.
METHODS: dict[str, dict[str, Any]] = {
    "jetspec": {"method": "jetspec", "model": "causal", "ngram_topk": 3},
    "dels": {"method": "dels", "model": "block", "local_head": "gru"},
    "eagle3_tree": {"method": "eagle3_tree", "model": "eagle3"},
    "longspec": {"method": "longspec", "model": "longspec"},
    "tokenswift": {
        "method": "tokenswift",
        "model": "swift",
        "draft_source": "self",
        "kv_budget": 32,
    },
    "ngram_tree": {"method": "ngram_tree"},
}


# Split by output columns, by input columns, and by heads.
ADAPTERS = {"one": ("q_proj", "v_proj", "down_proj"), "two": ("k_proj", "o_proj", "gate_proj")}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    target = make_target(folder / "target", VOCAB)
    for i, (name, modules) in enumerate(ADAPTERS.items(), 1):
        make_adapter(folder / name, target, modules, seed=i)
    make_head(folder / "causal", VOCAB)
    make_head(folder / "block", VOCAB, causal=False)
    make_local_head(folder / "gru", VOCAB)
    make_eagle3_head(folder / "eagle3", VOCAB)
    make_longspec_head(folder / "longspec", VOCAB)
    make_tokenswift_heads(folder / "swift", VOCAB)
    return folder


def _run(
    heads: Path, method: str | None, ahead: bool, *sabotage: str,
    calls: list[dict[str, Any]] = CALLS, **engine: Any,
) -> EngineResult:  # fmt: skip
    engine = {**tiny_engine(heads / "target"), "tensor_parallel_size": 2, **engine}
    if method is None:
        return run_engine(engine, calls, own_processes=True)
    # The default budget, which follows the clock.
    spec = {"num_speculative_tokens": 12, "max_step_rows": 512, **METHODS[method]}
    for name in ("model", "local_head"):
        if name in spec:
            spec[name] = str(heads / spec[name])
    return run_engine(
        {**engine, "async_scheduling": ahead},
        [with_own_budgets(call) for call in calls],
        speculative=spec,
        sabotage=sabotage,
        own_processes=True,
    )


@pytest.mark.parametrize("split", ["tensor", pytest.param("pipeline", marks=pytest.mark.full)])
def test_grammars_on_two_ranks(tmp_path: Path, split: str) -> None:
    """Requests with and without a grammar. The scheduler gets the parents of every draft."""
    target = make_text_target(tmp_path / "target")
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    speculative = {
        "method": "jetspec",
        "model": str(make_head(tmp_path / "head", vocab)),
        "num_speculative_tokens": 24,
        "max_step_rows": 4096,
    }
    kinds = [
        {"regex": "((red|blue) (cat|dog) ){3,12}"},
        {"choice": ["the quick brown fox", "the lazy dog", "the quick red fox"]},
        {"regex": "[a-c ]{8,40}"},
        {"json_object": True},
    ]
    params = [
        {"max_tokens": 60, "structured_outputs": kind, **chance}
        for kind in kinds
        for chance in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4})
    ]
    engine = {**tiny_engine(target), "skip_tokenizer_init": False}
    calls = [CALLS[0], {"prompts": [[60, 61, 62]] * len(params), "params": params}]
    plain = run_engine(engine, calls)
    tree = run_engine(
        {**engine, f"{split}_parallel_size": 2},
        [with_own_budgets(call) for call in calls],
        speculative=speculative,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        own_processes=True,
    )
    for call in range(len(calls)):
        assert tree.token_ids(call) == plain.token_ids(call)
        for counter in ("draft", "accepted"):
            assert tree.call_counter(call, f"vllm:spec_decode_num_{counter}_tokens") > 0
    assert len({tuple(ids) for ids in tree.token_ids(1)}) > len(kinds)


@pytest.mark.full
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_keep_the_output(heads: Path, method: str, ahead: bool) -> None:
    plain = _run(heads, None, ahead)
    tree = _run(heads, method, ahead, "clock", "drafts")
    for call in range(len(CALLS)):
        assert tree.token_ids(call) == plain.token_ids(call)
    assert_drafted(tree, least_acceptance=0.0)


@pytest.mark.full
def test_two_ranks_answer_by_adapter(heads: Path) -> None:
    each = [None, *((name, i, str(heads / name)) for i, name in enumerate(ADAPTERS, 1))]
    prompts = [prompt for prompt in PROMPTS for _ in each]
    calls = [{**call, "prompts": prompts, "adapters": each * len(PROMPTS)} for call in CALLS]
    # A slot stays empty: on a CPU vLLM reads the last one for rows without an adapter.
    lora = {"enable_lora": True, "max_loras": len(each), "max_lora_rank": 8}
    plain = _run(heads, None, True, calls=calls, **lora)
    answers = plain.token_ids()
    for i in range(0, len(answers), len(each)):
        assert len({tuple(ids) for ids in answers[i : i + len(each)]}) == len(each), "one is idle"
    tree = _run(heads, "jetspec", True, "clock", "drafts", calls=calls, **lora)
    for call in range(len(calls)):
        assert tree.token_ids(call) == plain.token_ids(call)
    assert_drafted(tree, least_acceptance=0.0)


@pytest.mark.full
def test_ranks_with_trees_of_their_own_would_be_noticed(heads: Path) -> None:
    plain = _run(heads, None, True)
    tree = _run(heads, "ngram_tree", True, "drafts", "own_trees")
    assert [tree.token_ids(i) for i in range(2)] != [plain.token_ids(i) for i in range(2)]


@pytest.mark.parametrize(
    "ahead", [pytest.param(False, marks=pytest.mark.full), True], ids=["waiting", "ahead"]
)
def test_ranks_with_schedulers_of_their_own_stay_together(
    heads: Path, tmp_path: Path, ahead: bool
) -> None:
    """As under torchrun: no rank's scheduler hears what the first rank's worker asks for, and the
    second rank drafts other trees by a clock of its own."""
    spec = {"num_speculative_tokens": 12, "max_step_rows": 512, "method": "ngram_tree"}
    engine = {**tiny_engine(heads / "target"), "async_scheduling": ahead}
    first, second = run_ranks(
        {**engine, "speculative_config": spec}, CALLS, tmp_path, "jitter", "drafts"
    )
    plain = _run(heads, None, ahead)
    for call in range(len(CALLS)):
        assert first.token_ids(call) == second.token_ids(call) == plain.token_ids(call)
    assert_drafted(first, least_acceptance=0.0)
