# SPDX-License-Identifier: Apache-2.0
"""Random local heads of every kind."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.methods.dels.head import LocalHead, LocalHeadConfig

V, H, S, R = 23, 12, 10, 6


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
