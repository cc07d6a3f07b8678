# SPDX-License-Identifier: Apache-2.0
"""DSpark heads with gated and recurrent Markov heads, and a Domino head, for the shipped heads'
target: no trained ones are shipped.

Each is a shipped head whose scores it changes a little by the block's states and by the branch, so
that deep branches are accepted.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.e2e.fork_server import REPO
from vllm_specplug.drafting.checkpoint_files import save_head
from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head
from vllm_specplug.methods.dspark_tree.config import (
    CONFIDENCE_BIAS,
    CONFIDENCE_WEIGHT,
    MARKOV_INPUT,
    MARKOV_OUTPUT,
    DSparkConfig,
)

KINDS = ("gated", "rnn", "domino")
_TARGET = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}
# The outputs of a recurrent Markov head are nearly linear up to here.
_LINEAR = 0.1


def branch_head(kind: str) -> Path:
    """Returns the folder of a head of one of `KINDS`."""
    folder = Path(os.environ["SPECPLUG_TESTS_SHARED"], f"{kind}_head")
    if not (folder / "config.json").is_file():
        _make_domino(folder) if kind == "domino" else _make_markov(folder, kind)
    return folder


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@torch.no_grad()
def _make_markov(folder: Path, kind: str) -> None:
    source = REPO / "heads" / "smollm2-135m-dspark"
    block, extras, *_ = load_dspark_head(source, _TARGET)
    config = DSparkConfig(**{**vars(block.config), "markov_head_type": kind})
    own = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    names = (MARKOV_INPUT, MARKOV_OUTPUT, CONFIDENCE_WEIGHT, CONFIDENCE_BIAS)
    tensors = {name: own[name] for name in names}
    hidden, rank = config.hidden_size, config.markov_rank
    if kind == "gated":
        weight = _random(rank, hidden + rank)
        tensors["markov_head.gate_proj.weight"] = weight / hidden**0.5
        # Gates of about 0.9.
        tensors["markov_head.gate_proj.bias"] = torch.full((rank,), 2.0)
    else:
        # tanh(small) / small: what the output reads of the token is the shipped head's row of W_1.
        # The other two read each other's outputs, the block's states and the state before.
        scale = _LINEAR / float(tensors[MARKOV_INPUT].abs().max())
        state = _random(3 * rank, rank) * 0.3
        state[2 * rank :] *= _LINEAR
        token = torch.cat((_random(2 * rank, rank) * 10, torch.eye(rank) * scale))
        slot = _random(3 * rank, hidden) / hidden**0.5
        slot[2 * rank :] *= _LINEAR * 0.1
        tensors["markov_head.joint_proj.weight"] = torch.cat((state, token, slot), dim=1)
        tensors["markov_head.joint_proj.bias"] = torch.zeros(3 * rank)
        tensors[MARKOV_OUTPUT] = tensors[MARKOV_OUTPUT] / scale
    _save(folder, {**block.state_dict(), **tensors}, config, extras.target_ids)


@torch.no_grad()
def _make_domino(folder: Path) -> None:
    block, extras = load_block_head(REPO / "heads" / "smollm2-135m-dflash", _TARGET)
    own = {"markov_rank": 16, "gru_hidden_dim": 32, "pure_draft_prefix_len": 1}
    config = DSparkConfig(**{**vars(block.config), "markov_head_type": "domino", **own})
    tensors = {
        name: _random(*shape) / shape[1] ** 0.5 for name, shape in config.extra_tensors.items()
    }
    # Embeddings of the target are small.
    tensors["prefix_gru.weight_ih_l0"] *= 10
    _save(folder, {**block.state_dict(), **tensors}, config, extras.target_ids)


def _save(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    config: DSparkConfig,
    target_ids: torch.Tensor | None,
) -> None:
    save_head(folder, tensors, config.to_dict(), target_ids=target_ids, dtype=torch.float32)
