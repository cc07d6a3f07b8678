# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the target on two tensor parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.tiny import make_adapter, make_head, make_target
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("adapter_ranks")]

# Split by output columns, by input columns, and by heads.
MODULES = {"one": ("q_proj", "v_proj", "down_proj"), "two": ("k_proj", "o_proj", "gate_proj")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    target = make_target(folder / "target", VOCAB)
    make_head(folder / "head", VOCAB)
    for i, (name, modules) in enumerate(MODULES.items(), 1):
        make_adapter(folder / name, target, modules, seed=i)
    return folder


def _run(folder: Path, speculative: dict[str, Any] | None) -> EngineResult:
    each = [None, *((name, i, str(folder / name)) for i, name in enumerate(MODULES, 1))]
    call = {
        "prompts": [prompt for prompt in PROMPTS for _ in each],
        "params": [
            PARAMS if p % 2 else {**PARAMS, "temperature": 0.8, "seed": p}
            for p in range(len(PROMPTS))
            for _ in each
        ],
        "adapters": each * len(PROMPTS),
    }
    # A slot stays empty: on a CPU vLLM reads the last one for rows without an adapter.
    lora = {"enable_lora": True, "max_loras": len(MODULES) + 1, "max_lora_rank": 8}
    return run_engine(
        {**tiny_engine(folder / "target"), **lora, "tensor_parallel_size": 2},
        [call],
        speculative=speculative,
        own_processes=True,
    )


@pytest.mark.parametrize("method", ["jetspec", "ngram_tree"])
def test_two_ranks_answer_by_adapter(folder: Path, method: str) -> None:
    plain = _run(folder, None).token_ids()
    count = len(MODULES) + 1
    for i in range(0, len(plain), count):
        assert len({tuple(ids) for ids in plain[i : i + count]}) == count, "an adapter is idle"
    options = {"num_speculative_tokens": 12, "tree_budget": 12, "max_step_rows": 512}
    head = {"model": str(folder / "head")} if method == "jetspec" else {}
    tree = _run(folder, {"method": method, **options, **head})
    assert tree.token_ids() == plain
    assert_drafted(tree, least_acceptance=0.0)
