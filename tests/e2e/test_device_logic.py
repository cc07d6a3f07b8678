# SPDX-License-Identifier: Apache-2.0
"""The logic that serves on CUDA, run on a CPU: its kernels in Triton's interpreter.

Few tokens, as the interpreter takes seconds for a step.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import assert_drafted, run_engine
from tests.e2e.tiny import make_head, make_target
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

pytestmark = pytest.mark.e2e


@pytest.mark.xdist_group("device_logic")
def test_the_cuda_backend_is_lossless_in_the_interpreter(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("device_logic")
    target, head = make_target(folder / "target", VOCAB), make_head(folder / "head", VOCAB)
    calls = [{"prompts": PROMPTS[:2], "params": {**PARAMS, "max_tokens": 8}}]
    plain = run_engine(tiny_engine(target), calls)
    tree = run_engine(
        tiny_engine(target),
        calls,
        speculative={
            "method": "jetspec",
            "model": str(head),
            "num_speculative_tokens": 7,
            "tree_budget": 7,
            "tree_kernel": "triton",
        },
        env={"TRITON_INTERPRET": "1"},
    )
    assert tree.token_ids() == plain.token_ids()
    assert_drafted(tree, least_acceptance=0.0)
