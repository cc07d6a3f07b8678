# SPDX-License-Identifier: Apache-2.0
"""Prompts that hold embeddings."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from tests.e2e.pair import target


def embeddings(token_ids: list[int]) -> torch.Tensor:
    """[n, H] what the text target has for these tokens."""
    weights = {}
    for path in sorted(target().glob("*.safetensors")):
        weights.update(load_file(path))
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    return weights[name][torch.tensor(token_ids)].float()
