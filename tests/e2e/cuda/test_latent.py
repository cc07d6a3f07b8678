# SPDX-License-Identifier: Apache-2.0
"""Trees over latent rows as on CUDA, against plain vLLM with its own Triton kernel for decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.cuda import cuda_device
from tests.e2e.cuda.cuda_drafts import knowing_levels
from tests.e2e.cuda.cuda_graphs import full_graphs, steps_from_graphs
from tests.e2e.cuda.cuda_pairs import INTERPRETED, PROMPTS, engines
from tests.e2e.latent import VOCAB, latent_target, make_latent_target
from tests.e2e.mtp_modules import add_module
from tests.e2e.pair import (
    Counts,
    Pair,
    generate,
    sequences_of,
    watch_preemptions,
    watch_prefix_hits,
)
from tests.e2e.requests import greedy, seeded
from tests.e2e.tiny import make_eagle3_head, make_head
from vllm_specplug.kernels import latent_attn_triton
from vllm_specplug.methods.block.latent import FusedLatentProjections
from vllm_specplug.vllm_v2.latent_device import LatentDeviceBackend

pytestmark = [
    *INTERPRETED,
    pytest.mark.skipif(cuda_device.ON_GPU, reason="vLLM's MLA backends on CUDA lack float32"),
]


def latent_engines(method: str = "oracle", *, ahead: bool = True, **options: Any) -> Pair:
    target = {"model": latent_target(), "skip_tokenizer_init": True}
    made = engines(method, ahead=ahead, target={**target, **options.pop("target", {})}, **options)
    assert isinstance(made.runner.tree_backend, LatentDeviceBackend)
    return made


def compared(made: Pair, prompts: list[list[int]] = PROMPTS, **options: Any) -> Counts:
    params = [
        greedy(max_tokens=16, logprobs=2, detokenize=False),
        *(seeded(i, max_tokens=14, detokenize=False) for i in (1, 2)),
    ]
    return made.compare(prompts, params[: len(prompts)], **options)[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_greedy_and_seeded(ahead: bool) -> None:
    """The second prompt is longer than a step, so pieces of it are in steps with trees."""
    launched: list[int] = []
    attend = latent_attn_triton.latent_attn_triton

    def counted(*args: Any, **kwargs: Any) -> None:
        launched.append(len(args[0]))
        attend(*args, **kwargs)

    with patch.object(latent_attn_triton, "latent_attn_triton", counted):
        made = latent_engines(ahead=ahead)
        counts = compared(made, least_accepted=20)
    assert counts.skipping > 1 and (counts.stale > 0) == ahead, counts
    assert len(launched) > 20


@pytest.mark.full
def test_lost_compaction_shows() -> None:
    made = latent_engines()
    backend = made.runner.tree_backend
    first, *_ = backend.groups
    half = replace(first[1], addresses=first[1].addresses[:1].repeat(2, 1))
    for control in (
        patch.object(backend, "compact", lambda *args: None),
        patch.object(backend, "groups", [(first[0], half)]),
    ):
        with control, pytest.raises(AssertionError, match="differs"):
            compared(made)
    # Nothing of it is left behind.
    compared(made)


@pytest.mark.full
def test_preemption_and_prefix_hits() -> None:
    long = [[(7 * i + n) % 250 + 5 for i in range(n)] for n in (40, 41, 42)]
    made = latent_engines(nodes=10, num_gpu_blocks_override=9, enable_prefix_caching=True)
    preempted, hits = watch_preemptions(made.tree), watch_prefix_hits(made.tree)
    made.compare(long, greedy(max_tokens=40, detokenize=False))
    assert preempted
    made.compare([long[2]], seeded(3, max_tokens=8, detokenize=False))
    assert max(hits.values()) >= 32, hits


@pytest.mark.full
def test_heads_with_keys_and_values_of_their_own(tmp_path: Path) -> None:
    """Draft layers have another KV cache than the target's layers."""
    heads = {
        "jetspec": make_head(tmp_path / "jetspec", VOCAB),
        "eagle3_tree": make_eagle3_head(tmp_path / "eagle3", VOCAB),
    }
    for method, head in heads.items():
        made = latent_engines(method, head={"model": str(head)})
        compared(made, least_accepted=0)


@pytest.mark.full
def test_the_targets_own_module(tmp_path: Path) -> None:
    """Its layer has MLA as well; the drafts on the device are the host's trees."""
    model = add_module(make_latent_target(tmp_path, "DeepseekV3"))
    with knowing_levels() as drafts:
        target = {"model": str(model)}
        made = latent_engines("mtp_tree", ngram_topk=0, target=target)
        compared(made, least_accepted=10)
    (layer,) = made.runner.drafter.drafter.head.layers
    assert isinstance(layer.qkv, FusedLatentProjections)
    assert drafts.nodes > 50 and not drafts.differing, drafts


@pytest.mark.full
@pytest.mark.parametrize("ahead", [False, True])
def test_ragged_trees_from_graphs(ahead: bool) -> None:
    with full_graphs():
        made = latent_engines(ahead=ahead)
        with steps_from_graphs(made):
            assert compared(made).skipping > 1


@pytest.mark.full
def test_steps_of_single_rows_take_vllms_kernel() -> None:
    """Steps that are scheduled ahead reserve rows for drafts; these are not."""
    made = latent_engines(ahead=False)
    # One row of the prompt is left for its second piece.
    prompts = [list(range(20, 53))]
    params = greedy(max_tokens=6, detokenize=False, extra_args={"specplug_tree_budget": 0})
    expected = generate(made.plain, prompts, params)
    unexpected = AssertionError("the tree kernel ran")
    with patch.object(latent_attn_triton, "latent_attn_triton", side_effect=unexpected):
        actual = generate(made.tree, prompts, params)
    assert sequences_of(actual) == sequences_of(expected)
