# SPDX-License-Identifier: Apache-2.0
"""Every engine mode and option keeps the output: a random small target, float32, greedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import EngineResult, assert_drafted, run_engine, with_own_budgets
from tests.e2e.tiny import make_head, make_target, make_text_target
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

pytestmark = pytest.mark.e2e


# name: engine arguments, speculative options
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # As users get it: compiled, the budget by the clock, n-grams merged.
    "compiled": ({"enforce_eager": False}, {"tree_budget": "auto"}),
    "reference_kernel": ({}, {"tree_kernel": "reference"}),
    # "auto" rounds the weights of bfloat16 heads, where the CPU has VNNI.
    "int8_head": ({}, {"draft_weights": "int8"}),
    "chain": ({}, {"tree_width": 1}),
    "one_node": ({}, {"num_speculative_tokens": 1}),
    "largest_tree": ({}, {"num_speculative_tokens": 256, "tree_width": 12, "tree_kernel": "cpp"}),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("modes")
    return make_target(folder / "target", VOCAB), make_head(folder / "head", VOCAB)


_CALLS = [{"prompts": PROMPTS, "params": PARAMS}]


def _plain(target: Path) -> EngineResult:
    return run_engine(tiny_engine(target), _CALLS)


@pytest.mark.xdist_group("engine_modes")
@pytest.mark.parametrize("mode", MODES)
def test_output_equals_plain_eager_decoding(models: tuple[Path, Path], mode: str) -> None:
    target, head = models
    engine, options = MODES[mode]
    if options.get("draft_weights") == "int8" and not torch.cpu._is_vnni_supported():
        pytest.skip("oneDNN's int8 products overflow without VNNI: the option is refused")
    speculative = {
        "method": "jetspec",
        "model": str(head),
        "num_speculative_tokens": 24,
        "max_step_rows": 4096,
        **options,
    }
    # Fixed unless a mode says otherwise: what is drafted must not depend on the clock.
    speculative.setdefault("tree_budget", speculative["num_speculative_tokens"])
    calls = _CALLS
    if speculative["tree_budget"] == "auto":
        calls = [with_own_budgets(call) for call in calls]
    tree = run_engine({**tiny_engine(target), **engine}, calls, speculative=speculative)
    assert tree.token_ids() == _plain(target).token_ids()
    assert len({tuple(ids) for ids in tree.token_ids()}) > 1
    assert_drafted(tree, least_acceptance=0.0)


@pytest.mark.xdist_group("engine_modes")
def test_tensor_parallel(tmp_path: Path) -> None:
    """Requests without a grammar; and constrained ones, where parents and masks of every draft
    reach both ranks. The budget follows each rank's clock."""
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
    calls = [*_CALLS, {"prompts": [[60, 61, 62]] * len(params), "params": params}]
    plain = run_engine(engine, calls)
    tree = run_engine(
        {**engine, "tensor_parallel_size": 2},
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
