# SPDX-License-Identifier: Apache-2.0
"""Random local heads of every kind."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig

V, H, S, R = 23, 12, 10, 6
TARGET = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": 2}


KINDS: dict[str, dict[str, Any]] = {
    "gru_factorized": {"kind": "gru", "hidden_size": S},
    "gru_projected": {"kind": "gru", "hidden_size": S, "input_size": 5},
    "gru_direct": {
        "kind": "gru",
        "hidden_size": S,
        "input_size": 7,
        "parameterization": "direct_vocab",
    },
    "gru_target_head": {"kind": "gru", "hidden_size": S, "lm_head_mode": "target_lm_head"},
    "gru_identity": {"kind": "gru", "hidden_size": S, "rank_activation": "identity"},
    "markov": {"kind": "markov"},
    "markov_direct": {"kind": "markov", "parameterization": "direct_vocab"},
    "markov_target_head": {"kind": "markov", "lm_head_mode": "target_lm_head"},
}


def make(name: str, seed: int = 0, **changes: Any) -> LocalHead:
    """A head with a random output, float32."""
    torch.manual_seed(seed)
    options = {"vocab_size": V, "target_hidden_size": H, "rank": R, **KINDS[name], **changes}
    head = LocalHead(LocalHeadConfig(**options))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head.eval()


def released(name: str) -> dict[str, Any]:
    """A file in the layout of the releases, with the optimizer state and arguments around it."""
    state = {key: value.clone() for key, value in make(name).state_dict().items()}
    config: dict[str, Any] = {"vocab_size": V, "rank_activation": "silu"}
    if name == "markov_target_head":
        return {
            "down_proj": state["input_proj.weight"].T.contiguous(),
            "up_proj": state["rank_to_hidden.weight"].T.contiguous(),
            "model_config": config,
            "rank": R,
        }
    if name == "markov_direct":
        return {
            "embedding_weight": state["embed_tokens.weight"],
            "lm_head_weight": state["low_rank_lm_head.weight"],
            "rank": R,
            "vocab_size": V,
        }
    return {
        "epoch": 1,
        "global_step": 10,
        "args": argparse.Namespace(lr=1e-3, out=Path("x")),
        "model_config": {**config, "embed_dim": H, "gru_hidden_dim": S, "low_rank_dim": R},
        "model_state_dict": state,
        "optimizer_state_dict": {"state": {0: {"step": torch.tensor(3.0)}}},
    }
