# SPDX-License-Identifier: Apache-2.0
"""Assistants of Gemma 4 under vLLM's method and as trees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer

from tests.e2e.assistants import make_followed_target
from tests.e2e.eagle3_chains import CHAIN, compare_drafts, own_engine
from tests.e2e.families import VOCAB, WINDOW_PROMPTS, around_windows
from tests.e2e.pair import core_of, make_engine, pair, watch_preemptions

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


def followed(folder: Path, grouped: bool) -> tuple[str, str]:
    target, assistant = make_followed_target(folder, VOCAB, grouped)
    return str(target), str(assistant)


@pytest.mark.parametrize("grouped", [False, True], ids=["all tokens", "groups"])
def test_chains_are_those_of_vllms_own_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    """With prompts shorter and longer than the window, and after prefix hits."""
    # vLLM captures CUDA graphs for groups, also on a CPU.
    monkeypatch.setattr(Gemma4Proposer, "_setup_centroids_cuda_graphs", lambda self: None)
    target, assistant = followed(tmp_path, grouped)
    engine: dict[str, Any] = {
        "model": target, "skip_tokenizer_init": True, "enable_prefix_caching": True,
        "async_scheduling": False,
    }  # fmt: skip
    engines = (
        own_engine("mtp", **engine, speculative={"model": assistant}),
        make_engine(
            "assistant_tree", speculative={**CHAIN, "method": "tree", "model": assistant}, **engine
        ),
    )
    # Without an accepted draft there is one of each of a prompt's 24 tokens but the last ones.
    assert 20 < compare_drafts(engines, WINDOW_PROMPTS) < 15 * len(WINDOW_PROMPTS)
    long = WINDOW_PROMPTS[-1]
    assert compare_drafts(engines, [[*long[:96], 12, 3]]) > 5
    # The control: another window shows in the drafts, and in nothing else.
    drafter = core_of(engines[1]).model_executor.driver_worker.worker.model_runner.drafter.drafter
    for cache in drafter.target_caches:
        cache.spec = replace(cache.spec, window=cache.spec.window and 5)
    with pytest.raises(AssertionError, match=r"^\(\d+, \{\d+: \(\["):
        compare_drafts(engines, WINDOW_PROMPTS)


# Engine arguments of the tree engine, and speculative options; the assistant of the second one has
# groups.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "waiting": ({"async_scheduling": False}, {}),
    "ahead": ({"async_scheduling": True}, {"tree_depth": 6}),
    # Prefix hits, chunked prompts, preemption, n-gram branches.
    "crowded": (
        {
            "enable_prefix_caching": True, "max_num_batched_tokens": 64,
            "num_gpu_blocks_override": 28,
        },
        {"ngram_topk": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "mode", ["ahead", "crowded", pytest.param("waiting", marks=pytest.mark.full)]
)
def test_trees_are_lossless_and_deep(tmp_path: Path, mode: str) -> None:
    tree, options = MODES[mode]
    target, assistant = followed(tmp_path, grouped=mode == "ahead")
    made = pair(
        "assistant_tree", model=target, skip_tokenizer_init=True, tree=tree,
        speculative={"model": assistant, "ngram_topk": 0, **options},
    )  # fmt: skip
    preempted = watch_preemptions(made.tree)
    counts = around_windows(made)
    assert counts.deep > 20 and counts.skipping > 10, counts
    assert bool(preempted) == (mode == "crowded")
