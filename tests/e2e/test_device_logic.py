# SPDX-License-Identifier: Apache-2.0
"""The logic that serves on CUDA, run on a CPU: its kernels in Triton's interpreter.

Few tokens, as the interpreter takes seconds for a step.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.harness import assert_drafted, run_engine
from tests.e2e.target_checks import SIZES
from tests.e2e.tiny import make_eagle3_head, make_head, make_other_target, make_target
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

pytestmark = pytest.mark.e2e


@pytest.mark.full
@pytest.mark.xdist_group("device_logic")
def test_windows_and_sinks_in_groups_are_lossless_in_the_interpreter(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """gpt-oss: windows of 16 and full attention in KV cache groups of their own, and sinks."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("device_windows")
    target, head = folder / "target", make_head(folder / "head", VOCAB)
    make_other_target(target, "GptOss", VOCAB, **SIZES["GptOss"])
    # Around the window, and two blocks long.
    prompts = [[(5 * i + n) % VOCAB for i in range(n)] for n in (13, 40)]
    calls = [{"prompts": prompts, "params": {**PARAMS, "max_tokens": 12}}]
    engine = {**tiny_engine(target), "disable_hybrid_kv_cache_manager": False}
    plain = run_engine(engine, calls)
    tree = run_engine(
        engine,
        calls,
        speculative={
            "method": "jetspec",
            "model": str(head),
            "num_speculative_tokens": 11,
            "tree_budget": 11,
            "tree_kernel": "triton",
        },
        env={"TRITON_INTERPRET": "1"},
    )
    assert tree.token_ids() == plain.token_ids()
    assert_drafted(tree, least_acceptance=0.0)


@pytest.mark.xdist_group("device_logic")
@pytest.mark.parametrize(
    ("method", "make"),
    [
        ("jetspec", make_head),
        pytest.param("eagle3_tree", make_eagle3_head, marks=pytest.mark.full),
    ],
)
def test_the_cuda_backend_is_lossless_in_the_interpreter(
    tmp_path_factory: pytest.TempPathFactory, method: str, make: Any
) -> None:
    """A block head, and a draft layer whose levels are drafted on the device."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("device_logic")
    target, head = make_target(folder / "target", VOCAB), make(folder / "head", VOCAB)
    calls = [{"prompts": PROMPTS[:2], "params": {**PARAMS, "max_tokens": 8}}]
    plain = run_engine(tiny_engine(target), calls)
    tree = run_engine(
        tiny_engine(target),
        calls,
        speculative={
            "method": method,
            "model": str(head),
            "num_speculative_tokens": 7,
            "tree_budget": 7,
            "tree_kernel": "triton",
        },
        env={"TRITON_INTERPRET": "1"},
    )
    assert tree.token_ids() == plain.token_ids()
    assert_drafted(tree, least_acceptance=0.0)
