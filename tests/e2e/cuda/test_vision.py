# SPDX-License-Identifier: Apache-2.0
"""Images in prompts and positions on three axes, on trees as on CUDA, against plain vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e import mistral3, vision
from tests.e2e.budgets import FLAT, freeze_costs
from tests.e2e.cuda import cuda_device, cuda_pairs
from tests.e2e.cuda.cuda_graphs import full_graphs, steps_from_graphs
from tests.e2e.cuda.cuda_pairs import INTERPRETED, LateCopy, knowing_candidates, late_copies
from tests.e2e.hybrids import wrapped_hybrid
from tests.e2e.pair import Counts, Pair, watch_prefix_hits
from tests.e2e.tiny import make_head
from tests.e2e.vision import VOCAB, compare_answers
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.vllm_v2 import model_state, stage

pytestmark = [
    *INTERPRETED,
    pytest.mark.full,
    pytest.mark.usefixtures("device_states", "device_axes"),
]


def engines(
    method: str = "oracle", *, ahead: bool, family: str = "Qwen2_5_VL", **options: Any
) -> Pair:
    make = partial(wrapped_hybrid, size=16) if family == "Qwen3_5" else vision.vision_target
    with vision.without_processors():
        target = {
            "model": make(family),
            "limit_mm_per_prompt": {"image": 2, "video": 0},
            **cuda_device.tower_arguments(),
            **(cuda_device.state_arguments() if family == "Qwen3_5" else {}),
        }
        return cuda_pairs.engines(method, ahead=ahead, target=target, **options)


def prompts() -> list[Any]:
    """Text, an image, two of them, and the first one's text around another; prompts with images are
    longer than a step, which may end inside one."""
    every = vision.prompts()
    return [every[0], every[4], vision.two_images(), every[7]]


def compare(made: Pair, inputs: list[Any], ahead: bool) -> Counts:
    expected, counts = compare_answers(made, inputs, max_tokens=14, logprobs=2, detokenize=False)
    # The same text around another image.
    assert expected[1].outputs[0].token_ids != expected[3].outputs[0].token_ids
    assert counts.accepted > 10 and counts.skipping > 2, counts
    assert (counts.stale > 0) == ahead, counts
    return counts


@pytest.mark.parametrize("ahead", [False, True])
def test_images_and_positions_on_three_axes(ahead: bool) -> None:
    compare(engines(ahead=ahead), prompts(), ahead)


def test_images_before_a_text_model_with_one_axis() -> None:
    """Mistral-Small 3, whose images are of any shape and have text tokens between their rows."""
    with mistral3.without_processors():
        target = {
            "model": mistral3.mistral3_target(),
            "limit_mm_per_prompt": {"image": 2},
            **cuda_device.tower_arguments(),
        }
        made = cuda_pairs.engines(ahead=True, target=target)
    every = mistral3.prompts()
    inputs = [every[i] for i in (0, 4, 5, 7)]
    compare(made, inputs, True)
    linear = patch.object(stage, "set_positions", lambda trees, positions: None)
    with linear, pytest.raises(AssertionError, match="request"):
        compare(made, inputs, True)


def test_images_before_recurrent_states() -> None:
    """Qwen3.5: Gated DeltaNet layers and rotary positions on three axes, which are interleaved."""
    made = engines(
        ahead=True, family="Qwen3_5", enable_prefix_caching=True,
        prefix_cache_retention_interval=None,
    )  # fmt: skip
    assert made.runner.state.state_layers.names
    hits = watch_prefix_hits(made.tree)
    for hit in (0, 32):
        hits.clear()
        compare(made, prompts(), True)
        assert max(hits.values()) == hit, hits
    linear = patch.object(model_state, "set_axes", lambda trees, positions: None)
    with linear, pytest.raises(AssertionError, match="request"):
        compare(made, prompts(), True)


# -- graphs --------------------------------------------------------------------------------


def test_positions_on_three_axes_from_graphs() -> None:
    """Graphs read positions where the steps write them; what padding has for positions does not
    matter."""
    with full_graphs():
        made = engines(ahead=True)
        rope = made.runner.model_state.rope_state
        prepare, address = rope.prepare_positions, rope.positions.data_ptr()

        def far(*args: Any) -> None:
            rope.positions.fill_(1500)
            prepare(*args)

        with patch.object(rope, "prepare_positions", far), steps_from_graphs(made):
            compare(made, prompts(), True)
        assert rope.positions.data_ptr() == address


# -- drafts on the device ------------------------------------------------------------------


@contextmanager
def linear_positions(made: Pair) -> Iterator[list[int]]:
    """A drafter's context has token numbers for positions, by which slots go, too; behind an image
    the target's are smaller. Yields how many rows were looked at in each step."""
    drafter, seen = made.runner.drafter.drafter, []
    observe, size = drafter.observe, made.runner.cache_config.block_size

    def observed(committed: CommittedTokens) -> None:
        is_final = committed.slots >= 0
        positions = committed.positions[is_final]
        assert torch.equal(committed.slots[is_final] % size, positions % size)
        seen.append(len(positions))
        observe(committed)

    with patch.object(drafter, "observe", observed):
        yield seen


def test_defaults_of_a_block_head_read_nothing(tmp_path: Path) -> None:
    """Images or not, the host waits for nothing."""
    head = make_head(tmp_path, VOCAB)
    with knowing_candidates(), late_copies():
        made = engines("jetspec", ahead=True, nodes=10, budget="auto", head={"model": str(head)})
        freeze_costs(made, FLAT)
        LateCopy.waits = 0
        with linear_positions(made) as rows:
            compare(made, prompts(), True)
        assert not LateCopy.waits and sum(rows) > 100, (LateCopy.waits, rows)
