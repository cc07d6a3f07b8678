# SPDX-License-Identifier: Apache-2.0
"""DSpark heads with gated and recurrent Markov heads, and a Domino head, for the shipped heads'
target: no trained ones are shipped.

Each is the block of a shipped head with an LM head to which noise was added, so that its likeliest
tokens are wrong. The second head reads the block's states and removes the noise, with an error that
depends a little on the branch. Markov heads also contain the shipped one.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.e2e.fork_server import REPO
from tests.e2e.harness import target_path
from vllm_specplug.drafting.checkpoint_files import read_safetensors, save_head, weight_files
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head
from vllm_specplug.methods.dspark_tree.config import (
    DOMINO_GRU,
    DOMINO_INPUT,
    DOMINO_OUTPUT,
    MARKOV_INPUT,
    MARKOV_LAYERS,
    MARKOV_OUTPUT,
    DSparkConfig,
)

KINDS = ("gated", "rnn", "domino")
_TARGET = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}
# Rank of the noise, size of the GRU, and how much of the correction the branch changes.
_RANK, _STATE, _BRANCH = 8, 16, 0.01
# Larger noise moves good tokens out of the candidates.
_NOISE = 1.0
# Sigmoid and tanh are nearly linear up to here.
_LINEAR = 0.02


@torch.no_grad()
def branch_head(kind: str, *, corrects: bool = True) -> Path:
    """Returns the folder of a head of one of `KINDS`; without `corrects` its second head adds 0."""
    folder = Path(os.environ["SPECPLUG_TESTS_SHARED"], f"{kind}_head_{corrects}")
    if (folder / "config.json").is_file():
        return folder
    shipped = "dflash" if kind == "domino" else "dspark"
    block, extras, markov, _ = load_dspark_head(REPO / f"heads/smollm2-135m-{shipped}", _TARGET)
    assert extras.target_ids is not None
    name = "embed_tokens.weight"
    tables = read_safetensors(weight_files(Path(target_path())), prefixes=(name,))
    lm_head = tables[name][extras.target_ids].float()
    # The noise is outer @ inner @ state, and inner @ state is about 1.
    scale = float(block.norm.weight.float().square().mean().sqrt()) * _TARGET["hidden_size"] ** 0.5
    inner = _random(_RANK, _TARGET["hidden_size"]) / scale
    outer = _NOISE * _random(len(lm_head), _RANK)
    if markov is None:
        own, tensors = _domino(inner, outer)
        output = DOMINO_OUTPUT
    else:
        w1 = markov.embed_tokens.weight.float()
        w2 = markov.low_rank_lm_head.weight.float()
        tensors = (_gated if kind == "gated" else _recurrent)(inner, outer, w1, w2)
        own = {"markov_rank": tensors[MARKOV_INPUT].shape[1]}
        output = MARKOV_OUTPUT
    if not corrects:
        tensors[output] = torch.zeros_like(tensors[output])
    tensors["lm_head.weight"] = lm_head - outer @ inner
    own = {"confidence_size": 0, "markov_head_type": kind, **own}
    config = DSparkConfig(**{**vars(block.config), **own}).to_dict()
    state = {**block.state_dict(), **tensors}
    save_head(folder, state, config, target_ids=extras.target_ids, dtype=torch.float32)
    return folder


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _gated(
    inner: torch.Tensor, outer: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> dict[str, torch.Tensor]:
    """w (sigmoid(y) - sigmoid(-y)) is about w y / 2, with w from the token before."""
    layer, row = MARKOV_LAYERS["gated"].name, 1 + _BRANCH * _random(len(w1), _RANK)
    # The gate of the shipped rows is 1 / 2.
    slot = torch.cat((_LINEAR * inner, -_LINEAR * inner, torch.zeros(w1.shape[1], inner.shape[1])))
    return {
        MARKOV_INPUT: torch.cat((row, row, w1), dim=1),
        MARKOV_OUTPUT: 2 * torch.cat((outer / _LINEAR, -outer / _LINEAR, w2), dim=1),
        f"{layer}.weight": torch.cat((slot, torch.zeros(len(slot), len(slot))), dim=1),
        f"{layer}.bias": torch.zeros(len(slot)),
    }


def _recurrent(
    inner: torch.Tensor, outer: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> dict[str, torch.Tensor]:
    """tanh(y) is about y, and y also reads the token before and the state."""
    layer, rank = MARKOV_LAYERS["rnn"].name, _RANK + w1.shape[1]
    scale = _LINEAR / float(w1.abs().max())
    state, token = _random(3 * rank, 2 * rank).split(rank, dim=1)
    slot = _random(3 * rank, inner.shape[1]) / inner.shape[1] ** 0.5
    for part, own in (
        (state, torch.zeros(rank, rank)),
        (token, torch.diag(torch.tensor([0.0] * _RANK + [scale] * w1.shape[1]))),
        (slot, torch.cat((_LINEAR * inner, torch.zeros(w1.shape[1], inner.shape[1])))),
    ):
        part[2 * rank :] = own + _BRANCH * _LINEAR * part[2 * rank :] * (part is not slot)
    return {
        MARKOV_INPUT: torch.cat((_random(len(w1), _RANK), w1), dim=1),
        MARKOV_OUTPUT: torch.cat((outer / _LINEAR, w2 / scale), dim=1),
        f"{layer}.weight": torch.cat((state, token, slot), dim=1),
        f"{layer}.bias": torch.zeros(3 * rank),
    }


def _domino(
    inner: torch.Tensor, outer: torch.Tensor
) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """silu(y) - silu(-y) is y, and y also reads the state. Also returns values of the config."""
    rows = torch.cat((inner, _BRANCH * _random(_RANK, _STATE)), dim=1)
    w_ih, w_hh = DOMINO_GRU
    tensors = {
        # Embeddings of the target are small.
        w_ih: _random(3 * _STATE, inner.shape[1]),
        w_hh: _random(3 * _STATE, _STATE) / _STATE**0.5,
        DOMINO_INPUT: torch.cat((rows, -rows)),
        DOMINO_OUTPUT: torch.cat((outer, -outer), dim=1),
    }
    return {"markov_rank": 2 * _RANK, "gru_hidden_dim": _STATE}, tensors
