# SPDX-License-Identifier: Apache-2.0
"""Heads that draft branch by branch as on CUDA.

Their trees are compared with those of the host in tests/unit/methods, and in test_local_tree.py and
test_draft_cache.py of tests/kernels.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e.cuda.cuda_drafts import knowing
from tests.e2e.cuda.cuda_pairs import (
    INTERPRETED,
    PROMPTS,
    compare,
    engines,
    knowing_candidates,
)
from tests.e2e.pair import target
from tests.e2e.requests import greedy
from tests.e2e.tiny import make_dflash2_head, make_dspark_head, make_eagle3_head
from vllm_specplug.methods.eagle3_tree.drafter import ParallelDrafter

DSPARK_KINDS = ("vanilla", "gated", "rnn", "domino")
pytestmark = [*INTERPRETED, pytest.mark.full]


@pytest.fixture(scope="module")
def pair_heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Heads that score tokens by those before them, by their kind."""
    vocab = json.loads((target() / "config.json").read_text())["vocab_size"]
    makers = {kind: partial(make_dspark_head, kind=kind) for kind in DSPARK_KINDS}
    return {
        name: {"model": str(make(tmp_path_factory.mktemp("head"), vocab))}
        for name, make in {**makers, "dflash2": make_dflash2_head}.items()
    }


@pytest.mark.parametrize("kind", ["dels", *DSPARK_KINDS, "dflash2"])
def test_local_trees_on_the_device(kind: str, pair_heads: dict[str, dict[str, str]]) -> None:
    method = {"dels": "dels", "dflash2": "dflash2_tree"}.get(kind, "dspark_tree")
    with knowing_candidates() as on_the_host:
        made = engines(method, ahead=True, ngram_topk=0, nodes=10, head=pair_heads.get(kind))
        on_the_host.clear()
        assert compare(made, True).skipping > 1
    assert set(on_the_host) == {0}


@pytest.mark.parametrize(
    ("method", "ahead"), [("eagle3_tree", False), ("eagle3_tree", True), ("mtp_tree", True)]
)
def test_draft_layers_on_the_device(method: str, ahead: bool) -> None:
    with knowing() as drafts:
        made = engines(method, ahead=ahead, ngram_topk=0, nodes=10)
        assert compare(made, ahead).skipping > 1
    assert drafts.nodes > 50, drafts


@pytest.mark.parametrize("mask", [None, 2])
def test_several_layers_on_the_device(mask: int | None, tmp_path: Path) -> None:
    """One with a sliding window; with a mask token, levels are drafted in one forward."""
    vocab = json.loads((target() / "config.json").read_text())["vocab_size"]
    head = make_eagle3_head(tmp_path, vocab, windows=(8, None, None), mask_token_id=mask)
    is_parallel = mask is not None
    known = knowing_candidates(ParallelDrafter, "candidates") if is_parallel else knowing()
    with known as drafts:
        made = engines("eagle3_tree", ahead=True, ngram_topk=0, nodes=10, head={"model": str(head)})
        assert compare(made, True).skipping > 1
    assert drafts.count(0) > 5 if is_parallel else drafts.nodes > 50, drafts


def test_draft_heads_beside_int8_caches() -> None:
    """A head's own keys and values keep the model's dtype, in pages of another size."""
    made = engines("jetspec", ahead=True, target={"kv_cache_dtype": "int8_per_token_head"})
    backend = made.runner.tree_backend
    assert {sample.keys.dtype for sample in backend.samples} == {torch.int8}
    made.compare(PROMPTS, greedy(max_tokens=20))
