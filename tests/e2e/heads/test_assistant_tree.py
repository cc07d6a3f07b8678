# SPDX-License-Identifier: Apache-2.0
"""Assistants of Gemma 4 under vLLM's method and as trees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.assistants import make_followed_target
from tests.e2e.eagle3_chains import CHAIN, compare_drafts, own_engine
from tests.e2e.families import VOCAB, WINDOW_PROMPTS, around_windows
from tests.e2e.pair import core_of, make_engine, pair, watch_preemptions

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, assistant = make_followed_target(tmp_path_factory.mktemp("followed"), VOCAB)
    return str(target), str(assistant)


def test_chains_are_those_of_vllms_own_method(followed: tuple[str, str]) -> None:
    """With prompts shorter and longer than the window, and after prefix hits."""
    target, assistant = followed
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


# Engine arguments of the tree engine, and speculative options.
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
def test_trees_are_lossless_and_deep(followed: tuple[str, str], mode: str) -> None:
    tree, options = MODES[mode]
    made = pair(
        "assistant_tree", model=followed[0], skip_tokenizer_init=True, tree=tree,
        speculative={"model": followed[1], "ngram_topk": 0, **options},
    )  # fmt: skip
    preempted = watch_preemptions(made.tree)
    counts = around_windows(made)
    assert counts.deep > 20 and counts.skipping > 10, counts
    assert bool(preempted) == (mode == "crowded")
