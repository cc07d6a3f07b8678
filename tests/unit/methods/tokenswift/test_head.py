# SPDX-License-Identifier: Apache-2.0
"""TokenSwift heads: the chain, and checkpoints in the published layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_specplug.methods.tokenswift.head import (
    TokenSwiftConfig,
    TokenSwiftHeads,
    load_heads,
    save_heads,
)

TARGET = {"hidden_size": 16, "vocab_size": 40, "num_hidden_layers": 3}


def _heads(draft_vocab: int = 40) -> TokenSwiftHeads:
    torch.manual_seed(0)
    heads = TokenSwiftHeads(TokenSwiftConfig(16, 40, draft_vocab))
    for parameter in heads.parameters():
        parameter.data.normal_()
    return heads


def test_heads_are_chained_residuals() -> None:
    heads, hidden = _heads(), torch.randn(5, 16)
    outputs, state = heads(hidden), hidden
    assert outputs.shape == (3, 5, 16)
    for head, output in zip(heads.medusa_layers, outputs, strict=True):
        normed = state / (state.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        state = state + (normed * head.input_layernorm.weight) @ head.linear.weight.t()
        post = state / (state.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(output, post * head.post_layernorm.weight)


def test_published_names(tmp_path) -> None:
    heads = _heads()
    save_heads(tmp_path, heads, dtype=torch.float32)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == {
        f"model.medusa_layers.{i}.{name}.weight"
        for i in range(3)
        for name in ("linear", "input_layernorm", "post_layernorm")
    }


def test_a_full_published_model_gives_its_heads_alone(tmp_path) -> None:
    save_heads(tmp_path, _heads(), dtype=torch.float32)
    path = tmp_path / "model.safetensors"
    base = {"model.layers.0.mlp.up_proj.weight": torch.ones(3, 3), "lm_head.weight": torch.ones(9)}
    save_file({**load_file(path), **base}, path)
    assert len(load_heads(tmp_path, TARGET)[0].state_dict()) == 9


def test_a_config_without_a_number_of_heads_is_refused(tmp_path) -> None:
    save_heads(tmp_path, _heads())
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 16, "vocab_size": 40}))
    with pytest.raises(ValueError, match="medusa_heads"):
        load_heads(tmp_path, TARGET)
