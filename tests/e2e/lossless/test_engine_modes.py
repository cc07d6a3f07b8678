# SPDX-License-Identifier: Apache-2.0
"""Every engine mode and option keeps the output: a random small target, float32, greedy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.compilation.counter import compilation_counter

from tests.e2e.pair import generate, make_engine, pair, sequences_of
from tests.e2e.requests import greedy
from tests.e2e.tiny import make_head, make_target
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


# name: arguments of the tree engine, speculative options
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("modes")
    return make_target(folder / "target", VOCAB), make_head(folder / "head", VOCAB)


@pytest.mark.parametrize("mode", MODES)
def test_output_equals_plain_eager_decoding(models: tuple[Path, Path], mode: str) -> None:
    target, head = models
    tree, options = MODES[mode]
    if options.get("draft_weights") == "int8" and not torch.cpu._is_vnni_supported():
        pytest.skip("oneDNN's int8 products overflow without VNNI: the option is refused")
    speculative = {
        "model": str(head), "num_speculative_tokens": 24, "max_step_rows": 4096, **options,
    }  # fmt: skip
    # Fixed unless a mode says otherwise: what is drafted must not depend on the clock.
    speculative.setdefault("tree_budget", speculative["num_speculative_tokens"])
    made = pair(
        "jetspec", model=str(target), skip_tokenizer_init=True, tree=tree, speculative=speculative
    )
    params = [greedy(**PARAMS) for _ in PROMPTS]
    if speculative["tree_budget"] == "auto":
        for one in params[1::2]:
            one.extra_args = {"specplug_tree_budget": 8}
    outputs, _ = made.compare(PROMPTS, params, branching=mode not in ("chain", "one_node"))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1


def test_a_compiled_graph_is_loaded_by_the_next_engine(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """It takes the weights of that engine."""
    target, head = shutil.copytree(models[0], tmp_path / "target"), models[1]
    options = {"model": str(head), "num_speculative_tokens": 8, "tree_budget": 8}
    params = greedy(**PARAMS)

    def tokens(method: str | None, **engine: Any) -> list[list[int]]:
        llm = make_engine(method, model=str(target), skip_tokenizer_init=True, **engine)
        return sequences_of(generate(llm, PROMPTS, params))

    compiled = {"enforce_eager": False, "speculative": options}
    first = tokens("jetspec", **compiled)
    path = target / "model.safetensors"
    tensors = load_file(path)
    for name in (name for name in tensors if name.endswith("down_proj.weight")):
        tensors[name] = -tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = compilation_counter.num_aot_artifacts_loaded
    second = tokens("jetspec", **compiled)
    assert compilation_counter.num_aot_artifacts_loaded == loaded + 1
    assert second == tokens(None) != first
