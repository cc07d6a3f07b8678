# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads as trees: lossless on a small target, and the heads are those of vLLM's own
method: as chains they draft what it drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.tiny import make_eagle3_head, make_target
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("eagle3_tree")]

LONG = [(7 * i * i + 3 * i) % 9 + 2 for i in range(101)]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"windows": (9, None)},
    "parallel": {"windows": (None, 9), "mask_token_id": 2},
}
CALLS = [
    {"prompts": PROMPTS, "params": PARAMS},
    {"prompts": PROMPTS, "params": {**PARAMS, "temperature": 0.8, "seed": 7}},
    {"prompts": [[*p, *([5, 6, 7, 8] * 16)] for p in PROMPTS], "params": PARAMS},
    # The last block that the second of these hits was followed by another token before.
    {"prompts": [LONG], "params": PARAMS},
    {"prompts": [[*LONG[:96], 10, 3]], "params": PARAMS},
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("eagle3")
    heads = {
        # The head's draft vocabulary lacks a token.
        name: make_eagle3_head(folder / name, VOCAB, draft_vocab_size=VOCAB - 1, **shape)
        for name, shape in SHAPES.items()
    }
    return make_target(folder / "target", VOCAB), heads


def _run(
    models: tuple[Path, dict[str, Path]], engine: dict[str, Any], **speculative: Any
) -> EngineResult:
    target, heads = models
    spec = {**speculative, "model": str(heads[speculative["model"]])} if speculative else None
    return run_engine({**tiny_engine(target), **engine}, CALLS, speculative=spec)


CROWDED = {
    # Prompts come in chunks, requests preempt each other, blocks are found again.
    "max_num_batched_tokens": 48,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 13,
}


@pytest.mark.parametrize("head", SHAPES)
def test_output_equals_plain_decoding(head: str, models: tuple[Path, dict[str, Path]]) -> None:
    plain = _run(models, {})
    tree = _run(
        models, CROWDED, model=head, method="eagle3_tree", num_speculative_tokens=12,
        tree_budget=12, tree_width=4, tree_depth=4,
    )  # fmt: skip
    for call in range(len(CALLS)):
        assert tree.token_ids(call) == plain.token_ids(call)
    assert tree.preemptions > 0
    assert tree.counters["vllm:prefix_cache_hits"] > 0
    assert_drafted(tree, least_acceptance=0.0)
