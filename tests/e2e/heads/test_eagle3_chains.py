# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads under vLLM's own method and as trees of one branch: the same drafts, token for
token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.eagle3_chains import (
    CHAIN,
    LONG,
    PROMPTS,
    compare_drafts,
    compare_in_batches_and_after_hits,
    drafts_of,
    own_engine,
)
from tests.e2e.pair import (
    head_options,
    make_engine,
    pair,
    target,
    watch_preemptions,
    watch_prefix_hits,
)
from tests.e2e.requests import greedy
from tests.e2e.tiny import make_eagle3_head
from vllm_specplug.methods.block.speculators_format import HeadTarget
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head, save_eagle3_head
from vllm_specplug.train.target import TargetWeights

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

CROWDED = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 9}


def _engines(**engine: Any) -> tuple[Any, Any]:
    engine = {"async_scheduling": False, **engine}
    chains = own_engine("eagle3", speculative=head_options("eagle3_tree"), **engine)
    return chains, make_engine("eagle3_tree", speculative=CHAIN, **engine)


def test_the_same_drafts_in_a_batch_and_after_prefix_hits() -> None:
    engines = _engines(enable_prefix_caching=True)
    hits = watch_prefix_hits(engines[1])
    compare_in_batches_and_after_hits(engines)
    # Three blocks are there, and the last one is computed again.
    assert list(hits.values())[-1] == 64


@pytest.mark.full
def test_the_same_drafts_from_the_format_of_speculators(tmp_path: Path) -> None:
    weights, options = TargetWeights(target()), head_options("eagle3_tree")
    head, extras = load_eagle3_head(options["model"], weights.config)
    made_for = HeadTarget.of(weights.folder, head.config, extras.target_ids, "")
    save_eagle3_head(
        tmp_path, head, target=made_for, depth=3,
        target_ids=extras.target_ids, lm_head=extras.lm_head,
        embed_tokens=weights.tables().embed_tokens, dtype=torch.float32,
    )  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    own = {"model": str(tmp_path)}
    engines = (
        own_engine("eagle3", speculative={**options, **own}, async_scheduling=False),
        make_engine("eagle3_tree", speculative={**CHAIN, **own}, async_scheduling=False),
    )
    assert compare_drafts(engines, PROMPTS) > 20


def test_chunks_and_preemption_leave_the_drafts() -> None:
    """Drafts depend on the tokens before them alone. (With vLLM's own method they also depend on
    where a prompt was cut, so this compares with prompts that were not.)"""
    # Chains: the order of a tree's nodes follows rounding where their scores are close.
    llm = make_engine("eagle3_tree", speculative=CHAIN, **CROWDED)
    alone: dict[Any, list[int]] = {}
    for prompt in PROMPTS:
        alone.update(drafts_of(llm, [prompt])[0])
    preempted = watch_preemptions(llm)
    mixed, _ = drafts_of(llm, [LONG, *PROMPTS])
    assert preempted
    common = set(alone) & set(mixed)
    assert len(common) > 10, (len(common), len(alone), len(mixed))
    for known in common:
        count = min(len(alone[known]), len(mixed[known]))
        assert alone[known][:count] == mixed[known][:count], len(known)


@pytest.mark.parametrize("kind", ["other heads", "window", "layers", "parallel"])
def test_layers_unlike_the_targets(kind: str, tmp_path: Path) -> None:
    """The same drafts, and plain outputs. Pages have a shape of their own, with more KV heads than
    the target has query heads; a sliding window is shorter than most prompts here."""
    shapes: dict[str, dict[str, Any]] = {
        "other heads": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64},
        "window": {"windows": (12,)},
        "layers": {"windows": (None, None, None)},
        "parallel": {"windows": (None, None), "mask_token_id": 2},
    }
    vocab = json.loads((target() / "config.json").read_text())["vocab_size"]
    head = make_eagle3_head(tmp_path, vocab, draft_vocab_size=vocab - 40, **shapes[kind])
    options = {"model": str(head)}
    engine: dict[str, Any] = {"async_scheduling": False, "enable_prefix_caching": True}
    engines = (
        own_engine(
            "eagle3", speculative={**options, "parallel_drafting": kind == "parallel"}, **engine
        ),
        make_engine("eagle3_tree", speculative={**CHAIN, **options}, **engine),
    )
    compare_in_batches_and_after_hits(engines)
    # Trees, through chunks and preemption.
    made = pair("eagle3_tree", tree=CROWDED, speculative={**options, "tree_depth": 4})
    preempted = watch_preemptions(made.tree)
    made.compare([LONG, *PROMPTS], greedy(max_tokens=40), least_accepted=0)
    assert preempted
