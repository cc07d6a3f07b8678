# SPDX-License-Identifier: Apache-2.0
"""Two replicas of a mixture-of-experts target, which run every forward together: one that has no
request runs dummy forwards beside the other's trees, whatever their size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.moe_replicas import ROUNDS
from tests.e2e.tiny import make_head, make_other_target
from tests.side_by_side import run_side_by_side

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("moe_replicas")]

VOCAB = 300
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    make_other_target(folder / "target", "Qwen3Moe", VOCAB, sharp=3.0, **SIZES)
    make_head(folder / "head", VOCAB)
    return folder


def _run(folder: Path, options: dict[str, Any] | None, **job: Any) -> list[Any]:
    """Results of both replicas."""
    from vllm.utils.network_utils import get_open_port

    if options is not None:
        options = {"model": str(folder / "head"), "num_speculative_tokens": 12, **options}
    job = {"options": options, "sabotage": False, "port": get_open_port(), **job}
    parts = ["0", "1"] if options is not None else ["0", "1", "alone"]
    each = [[str(folder), part, json.dumps(job)] for part in parts]
    run_side_by_side("tests.e2e.moe_replicas", each, folder, timeout_s=500)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    """What one engine without drafts answers, and two replicas without drafts."""
    replicas = _run(folder, None)
    alone = json.loads((folder / "alone.json").read_text())
    assert _answers(replicas) == _expected(alone)
    return alone


def _answers(replicas: list[Any]) -> list[Any]:
    return [replica["answers"] for replica in replicas]


def _expected(plain: list[list[int]]) -> list[Any]:
    return [[[plain[place] for place in places[rank]] for places, _ in ROUNDS] for rank in range(2)]


@pytest.mark.parametrize("budget", [12, "auto"])
def test_an_idle_replica_neither_stops_nor_changes_the_other(
    folder: Path, plain: list[list[int]], budget: Any
) -> None:
    replicas = _run(folder, {"method": "jetspec", "tree_budget": budget})
    assert _answers(replicas) == _expected(plain)
    for rank, replica in enumerate(replicas):
        counters = replica["counters"]
        assert counters["vllm:spec_decode_num_drafts"] > 0
        assert counters["vllm:spec_decode_num_accepted_tokens"] > 0
        idle = [not places[rank] for places, _ in ROUNDS]
        # One for each forward of the other replica: 40 tokens take more than a few.
        assert all(runs > 5 for runs, alone in zip(replica["dummies"], idle, strict=True) if alone)


def test_the_comparison_notices_a_cache_that_is_not_compacted(
    folder: Path, plain: list[list[int]]
) -> None:
    replicas = _run(folder, {"method": "jetspec", "tree_budget": 12}, sabotage=True)
    assert _answers(replicas) != _expected(plain)
