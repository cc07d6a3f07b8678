# SPDX-License-Identifier: Apache-2.0
"""The LongSpec layer, its config and its checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_specplug.methods.block.head import rotary_cos_sin
from vllm_specplug.methods.longspec.checkpoint import (
    inspect_longspec_head,
    load_longspec_head,
    save_longspec_head,
)
from vllm_specplug.methods.longspec.config import LongSpecConfig
from vllm_specplug.methods.longspec.head import LongSpecHead

TARGET: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_hidden_layers": 3,
}


def make_head(**changes: Any) -> LongSpecHead:
    torch.manual_seed(0)
    return LongSpecHead(replace(LongSpecConfig.for_target(TARGET, window_size=16), **changes))


@pytest.mark.parametrize("prefix", ["", "model.", "layers.0.", "model.layers.0."])
def test_published_layout_is_read(tmp_path: Path, prefix: str) -> None:
    """Biases on q, k, v; unused cross-attention keys; no final norm; a target-like config."""
    head = make_head(final_norm=False)
    tensors = {prefix + name: tensor for name, tensor in head.state_dict().items()}
    for name in ("k_proj", "v_proj"):
        tensors[f"{prefix}cross_attn.{name}.weight"] = torch.zeros(16, 32)
        tensors[f"{prefix}cross_attn.{name}.bias"] = torch.zeros(16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**TARGET, "num_hidden_layers": 1}))
    loaded, target_ids = load_longspec_head(tmp_path, TARGET)
    assert target_ids is None
    assert loaded.config.attention_bias and not loaded.config.final_norm
    assert loaded.config.window_size == 512
    assert torch.equal(loaded.self_attn.q_proj.bias, head.self_attn.q_proj.bias)


def _spoiled(folder: Path, change: dict[str, Any]) -> None:
    save_longspec_head(folder, make_head())
    config = json.loads((folder / "config.json").read_text())
    config.update(change)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4, legal: 2"),
        ({"rope_theta": 500000.0}, "rope_theta = 500000.0, legal: 10000.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 2.0}}, "rope_type = 'dynamic', legal"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2, "max_trained_positions": 9}},
            "rope_type = 'dynamic', legal",
        ),
        ({"window_size": 0}, "window_size = 0, legal: an integer within 1..65536"),
        ({"window_size": 65537}, "window_size = 65537, legal"),
        ({"window_size": True}, "window_size = True, legal"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2, legal: 1"),
        ({"draft_vocab_size": 20}, "missing d2t"),
        ({"hidden_size": "32"}, "hidden_size = '32', legal: an integer"),
    ],
)
def test_misfits_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    _spoiled(tmp_path, change)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        inspect_longspec_head(tmp_path, TARGET)


def test_a_target_that_keeps_a_window_of_its_last_layer_is_refused(tmp_path: Path) -> None:
    save_longspec_head(tmp_path, make_head())
    sliding = {**TARGET, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    with pytest.raises(ValueError, match=r"layer_types\[-1\] = 'sliding_attention'"):
        inspect_longspec_head(tmp_path, sliding)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize("rope", [LLAMA3, YARN, DYNAMIC], ids=["llama3", "yarn", "dynamic"])
def test_a_head_has_the_angles_that_vllm_gives_its_target(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    target = {**TARGET, "rope_parameters": rope}
    config = LongSpecConfig.for_target(target, window_size=16)
    save_longspec_head(tmp_path, LongSpecHead(config), dtype=torch.float32)
    head, _ = load_longspec_head(tmp_path, target)
    assert head.config == config
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(8, 256, rope_parameters=rope, dtype=torch.float32)
    cos, sin = (part[:, :4] for part in rotary_cos_sin(torch.arange(256), config.rotary))
    torch.testing.assert_close(torch.cat((cos, sin), -1), served.cos_sin_cache)


def test_a_target_with_yarn_gives_its_angles_to_a_head_trained_without(tmp_path: Path) -> None:
    save_longspec_head(tmp_path, make_head())
    target = {**TARGET, "rope_parameters": YARN}
    head, _ = load_longspec_head(tmp_path, target)
    assert head.config.rotary == LongSpecConfig.for_target(target).rotary
    with pytest.raises(ValueError, match="rope_theta = 10000.0, legal: 5"):
        load_longspec_head(tmp_path, {**TARGET, "rope_parameters": {**YARN, "rope_theta": 5.0}})
