# SPDX-License-Identifier: Apache-2.0
"""What calibration's dummy forwards get, so that their rows cost what real rows cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplug.vllm_v2.model_state import with_trees
from vllm_specplug.vllm_v2.step_context import StepContext


class _Stock:
    """As vLLM's: dummy rows are padding, and their embeddings are equal."""

    def prepare_attn(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def dummy_inputs_embeds(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, 8)


@pytest.mark.parametrize("calibrates", [False, True])
def test_dummy_rows_of_a_calibration_take_different_experts(calibrates: bool) -> None:
    step = StepContext()
    backend: Any = SimpleNamespace(captures_trees=lambda: False, attach=lambda *args: None)
    state = with_trees(_Stock(), step, backend, {}, (), False)
    batch = SimpleNamespace(is_padding=torch.ones(6, dtype=torch.bool))
    step.has_dummy_rows = calibrates
    state.prepare_attn(batch, None, ())
    assert batch.is_padding.all() != calibrates and batch.is_padding.any() != calibrates
    embeds = state.dummy_inputs_embeds(6)
    assert embeds is not None and (len(embeds.unique(dim=0)) == 6) == calibrates
