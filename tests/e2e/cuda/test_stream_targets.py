# SPDX-License-Identifier: Apache-2.0
"""Targets with recurrent states, images and adapters on a device that keeps only the order of
streams; see `cuda_streams`.

Each test compares with plain vLLM and fails on any race; then it takes something away that orders
the same engine's work, and fails unless that is noticed. LoRA's kernels are those that vLLM has for
CPUs; which rows are whose, and the weights, take the ways of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Before vLLM's CPU worker.
from tests.e2e.cuda.cuda_races import kept_pinned, knowing, ordered, races  # isort: skip

import pytest
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gated_delta
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

from tests.e2e import adapters
from tests.e2e.cuda import cuda_hybrids, cuda_vision
from tests.e2e.cuda.cuda_pairs import INTERPRETED, PROMPTS, engines
from tests.e2e.cuda.cuda_streams import device
from tests.e2e.tiny import make_head
from tests.pretended_device import Stream
from vllm_specplug.vllm_attention import device_states

pytestmark = [*INTERPRETED, pytest.mark.full, pytest.mark.usefixtures("stream_worker")]


@pytest.fixture
def state_kernels(device_states: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on CUDA; here of operations that look at numbers."""
    for name in ("causal_conv1d_fn", "fla_chunk_gated_delta_rule"):
        monkeypatch.setattr(gated_delta, name, device.one_kernel(getattr(gated_delta, name)))


def is_noticed(control: Any, told: tuple[str, ...], run: Callable[[], object]) -> None:
    """A race is told of, with all of `told` in its text, once `control` is in place."""
    with races() as found, control, suppress(Exception):
        run()
    texts = [str(race) for race in found]
    assert any(all(part in text for part in told) for text in texts), texts[:3]


def aside(owner: Any, name: str) -> Any:
    """A method's work, put on a stream of its own that nobody waits for."""
    stock = getattr(owner, name)

    @wraps(stock)
    def instead(*args: Any, **kwargs: Any) -> Any:
        with Stream():
            return stock(*args, **kwargs)

    return patch.object(owner, name, instead)


@pytest.mark.usefixtures("state_kernels")
def test_recurrent_states(tmp_path: Path) -> None:
    """Rows of a step go over from the host, which waits for no step."""
    head = make_head(tmp_path, cuda_hybrids.VOCAB)
    with knowing():
        with ordered():
            made = cuda_hybrids.engines(
                method="jetspec", ahead=True, nodes=10, budget=10, head={"model": str(head)}
            )
            counts = cuda_hybrids.compared(made, least_accepted=10)
        assert counts.skipping > 1 and counts.stale > 0, counts
        again = patch.object(device_states, "to_device", kept_pinned())
        is_noticed(again, ("pinned", "device_states.py"), lambda: cuda_hybrids.compared(made))


@pytest.mark.usefixtures("device_states", "device_axes")
def test_images() -> None:
    """A tower's outputs, and positions on three axes, which the host stages."""
    with ordered():
        made = cuda_vision.engines(ahead=True)
        inputs = cuda_vision.prompts()
        cuda_vision.compare(made, inputs, True)
    made.tree.llm_engine.reset_encoder_cache()
    is_noticed(
        aside(EncoderRunner, "execute_mm_encoder"),
        ("device memory",),
        lambda: cuda_vision.compare(made, inputs, True),
    )


def test_adapters() -> None:
    """Three adapters and the bare target in one batch; more than run at once."""
    each = adapters.adapters()
    batch = adapters.batch(PROMPTS[:2], each, max_tokens=10)
    with ordered():
        made = engines(ahead=True, target=adapters.LORA)
        expected, counts = made.compare(**batch, least_accepted=10)
    assert counts.stale > 0, counts
    answers = {tuple(output.outputs[0].token_ids) for output in expected[: len(each)]}
    assert len(answers) == len(each), "an adapter changes nothing"
    made.runner.lora_manager.remove_all_adapters()
    is_noticed(
        aside(BaseLinearLayerWithLoRA, "set_lora"),
        ("device memory", "base_linear.py"),
        lambda: made.compare(**batch),
    )
