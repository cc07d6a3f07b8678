# SPDX-License-Identifier: Apache-2.0
"""The head computes what the public equations say, for the weights of every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.methods.eagle3_tree.heads import LAYOUTS, write_head
from tests.unit.methods.eagle3_tree.published import SMALL
from tests.unit.methods.eagle3_tree.reference import ReferenceHead
from vllm_specplug.kernels.reference import dense_attention
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head
from vllm_specplug.methods.eagle3_tree.head import FusedEagle3Head

ROWS = 9
NORMS = {f"midlayer.self_attn.{n}_norm.weight": 1 + torch.rand(8) for n in "qk"}
BIASES = {"midlayer.self_attn.q_proj.bias": torch.randn(32)} | {
    f"midlayer.self_attn.{n}_proj.bias": torch.randn(16) for n in "kvo"
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # Scaled angles are compared with vLLM's below.
    **{layout: (layout, {}) for layout in LAYOUTS if not layout.startswith("modelopt")},
    "norm_before_fc": ("speculators", {"norm_before_fc": True}),
    "norm_before_residual": ("specforge", {"norm_before_residual": True}),
    "norm_output": ("specforge", {"norm_output": True}),
    "qk_norm": ("specforge", {"extra": NORMS}),
    "biases": ("specforge", {"extra": BIASES}),
    "partial": ("specforge", {"partial_rotary_factor": 0.5}),
    "partial in parameters": ("specforge", {"rope_parameters": {"partial_rotary_factor": 0.25}}),
}


def causal(
    windows: tuple[int | None, ...], layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    mask = torch.ones(len(q), len(k)).tril().bool()
    if (window := windows[layer]) is not None:
        mask = mask.triu(1 - window)
    return dense_attention(q, k, v, q.shape[-1] ** -0.5, q.shape[1] // k.shape[1], mask)[0]


@pytest.mark.parametrize("form", [lambda head: head, lambda head: FusedEagle3Head(head, 64)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_those_of_the_equations(variant: str, form: Any, tmp_path: Path) -> None:
    layout, changes = VARIANTS[variant]
    raw, tensors = write_head(tmp_path, layout, **changes)
    if raw.get("norm_before_fc"):
        assert "input_norm.weight" in tensors
    config = {**raw, **raw.get("transformer_layer_config", {})}
    config["rope_theta"] = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    reference = ReferenceHead(config, tensors)
    head = form(load_eagle3_head(tmp_path, SMALL)[0])
    attention = partial(causal, head.config.windows)
    torch.manual_seed(1)
    embeds, aux = torch.randn(ROWS, 16), [torch.randn(ROWS, 16) for _ in range(3)]
    positions = torch.arange(ROWS)
    states = head.features(torch.cat(aux, -1))
    torch.testing.assert_close(states, reference.fuse(aux), atol=1e-4, rtol=1e-4)
    ours = head.forward(embeds, states, positions, attention)
    for a, b in zip(ours, reference.run(embeds, states, positions), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    # What is written for the context is what the rows bring themselves.
    seen: list[torch.Tensor] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen[:] = k, v
        return attention(layer, q, k, v)

    head.forward(embeds, states, positions, attend)
    for a, b in zip(head.context_kv(embeds, states, positions, attention), seen, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
         "beta_fast": 32.0, "beta_slow": 1.0},
    ],
)  # fmt: skip
def test_scaled_rotary_embeddings_are_vllms(scaling: dict[str, Any], tmp_path: Path) -> None:
    """Against the module that the target and vLLM's own method rotate with."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    write_head(tmp_path, "specforge", rope_scaling=scaling, rope_theta=500000.0)
    head = load_eagle3_head(tmp_path, SMALL)[0]
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            8, max_position=256, dtype=torch.float32,
            rope_parameters={**scaling, "rope_theta": 500000.0},
        )  # fmt: skip
    cos, sin = head.rotary(torch.arange(256))
    expected = rope.cos_sin_cache[:256].float()
    torch.testing.assert_close(torch.cat((cos, sin), -1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_three_positions_of_text_turn_as_one(interleaved: bool, tmp_path: Path) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    scaling = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": interleaved}
    write_head(tmp_path, "specforge", rope_scaling=scaling, rope_theta=500000.0)
    head = FusedEagle3Head(load_eagle3_head(tmp_path, SMALL)[0], 64)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            8, max_position=64, dtype=torch.float32,
            rope_parameters={**scaling, "rope_theta": 500000.0},
        )  # fmt: skip
    positions = torch.arange(40)
    query, key = torch.randn(40, 4, 8), torch.randn(40, 2, 8)
    expected, _ = rope.forward_native(
        positions.expand(3, -1), query.flatten(1).clone(), key.flatten(1).clone()
    )
    ours = head.layers[0].rotate(query, positions)
    torch.testing.assert_close(ours.flatten(1), expected, atol=1e-5, rtol=1e-5)


def test_a_head_on_the_meta_device_has_its_angles(tmp_path: Path) -> None:
    write_head(tmp_path, "modelopt")
    head = load_eagle3_head(tmp_path, SMALL)[0]
    assert not head.rotary(torch.arange(2))[0].is_meta
