# SPDX-License-Identifier: Apache-2.0
"""Heads that draft branch by branch as on CUDA, against the host's trees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.cuda.cuda_drafts import assert_same_trees, knowing_contexts, knowing_levels
from tests.e2e.cuda.cuda_pairs import (
    INTERPRETED,
    compare,
    compare_block_head,
    engines,
    knowing_candidates,
)
from tests.e2e.pair import target
from tests.e2e.tiny import make_dflash2_head, make_dspark_head, make_eagle3_head
from vllm_specplug.methods.eagle3_tree.drafter import ParallelDrafter
from vllm_specplug.methods.local.tree import LocalTreeBuilder

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


@contextmanager
def local_trees_are_the_hosts() -> Iterator[list[int]]:
    """Every tree of a local head is also built request by request on the host, from the same
    scores; yields the nodes of each draft."""
    original, seen = LocalTreeBuilder.build_on_device, []

    def build(self: Any, ids: Any, log_probs: Any, anchors: Any, budgets: Any, depths: Any,
              *, width: int, **limits: Any) -> Any:  # fmt: skip
        made = original(self, ids, log_probs, anchors, budgets, depths, width=width, **limits)
        reach = depths.clamp(0, ids.shape[1])
        # Without kernels for this CPU the host builds them as a device does.
        with patch.object(LocalTreeBuilder, "build_on_device", original):
            oracle = self.build(
                ids, log_probs, anchors.tolist(), budgets.tolist(), reach.tolist(),
                width, limits.get("slots"), limits.get("terms"),
            )  # fmt: skip
        seen.append(assert_same_trees(made, dict(enumerate(oracle))))
        return made

    with patch.object(LocalTreeBuilder, "build_on_device", build):
        yield seen


@pytest.mark.parametrize("ahead", [False, True])
def test_local_head_on_the_device(ahead: bool) -> None:
    with local_trees_are_the_hosts() as nodes:
        assert set(compare_block_head("dels", ahead, 0)) == {0}
    assert sum(nodes) > 50, nodes


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", [*DSPARK_KINDS, "dflash2"])
def test_tokens_before_on_the_device(
    kind: str, ahead: bool, pair_heads: dict[str, dict[str, str]]
) -> None:
    method = "dflash2_tree" if kind == "dflash2" else "dspark_tree"
    with local_trees_are_the_hosts() as nodes:
        found = compare_block_head(method, ahead, 0, pair_heads[kind])
    assert set(found) == {0} and sum(nodes) > 50, nodes


@pytest.mark.parametrize(
    ("method", "ahead"), [("eagle3_tree", False), ("eagle3_tree", True), ("mtp_tree", True)]
)
def test_draft_layers_on_the_device(method: str, ahead: bool) -> None:
    with knowing_levels() as drafts:
        made = engines(method, ahead=ahead, ngram_topk=0, nodes=10)
        assert compare(made, ahead).skipping > 1
    assert drafts.nodes > 50 and not drafts.differing, drafts


@pytest.mark.parametrize("mask", [None, 2])
def test_several_layers_on_the_device(mask: int | None, tmp_path: Path) -> None:
    """One with a sliding window; with a mask token, levels are drafted in one forward."""
    vocab = json.loads((target() / "config.json").read_text())["vocab_size"]
    head = make_eagle3_head(tmp_path, vocab, windows=(8, None, None), mask_token_id=mask)
    is_parallel = mask is not None
    knowing = partial(knowing_candidates, ParallelDrafter, "candidates")
    with (knowing if is_parallel else knowing_levels)() as drafts, knowing_contexts() as contexts:
        made = engines("eagle3_tree", ahead=True, ngram_topk=0, nodes=10, head={"model": str(head)})
        assert compare(made, True).skipping > 1
    if is_parallel:
        assert drafts.count(0) > 5, drafts
    else:
        assert drafts.nodes > 50 and not drafts.differing, drafts
    assert len(contexts) > 10 and max(contexts) > 40, contexts
