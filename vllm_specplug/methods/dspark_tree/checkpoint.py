# SPDX-License-Identifier: Apache-2.0
"""Reads DSpark and Domino heads (safetensors only), with the block head's strict checks, and writes
DSpark heads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import load_module
from vllm_specplug.methods.block.checkpoint import (
    BlockHeadExtras,
    load_block_head,
    save_block_head,
)
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.speculators_format import HeadTarget
from vllm_specplug.methods.dspark_tree.config import (
    CONFIDENCE_BIAS,
    CONFIDENCE_WEIGHT,
    DOMINO_GRU,
    DOMINO_INPUT,
    DOMINO_OUTPUT,
    MARKOV_INPUT,
    MARKOV_LAYERS,
    MARKOV_OUTPUT,
    DSparkConfig,
)
from vllm_specplug.methods.local.head import (
    ConfidenceHead,
    LocalHead,
    LocalHeadConfig,
    LocalHeadKind,
)

# Measured with the shipped head and trees of 8 to 32 nodes: 0.5 gives the highest acceptance length
# for greedy requests, and at other temperatures a length within 1 % of the best power's.
CONFIDENCE_POWER = 0.5

_LOCAL_KINDS: dict[str, LocalHeadKind] = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}


def load_dspark_head(
    directory: str | Path, target_config: Any
) -> tuple[BlockHead, BlockHeadExtras, LocalHead | None, ConfidenceHead | None]:
    """Reads a head of any of its trainers and checks it against its target.

    Arguments and errors are those of `load_block_head`.

    Returns:
        The block head, its extras, the Markov head or Domino's recurrent head, and the confidence
        head; None for a head that the checkpoint has not.
    """
    head, extras = load_block_head(directory, target_config, DSparkConfig)
    config, extra = head.config, extras.extra
    assert isinstance(config, DSparkConfig)
    markov = confidence = None
    if config.markov_head_type == "domino":
        markov = domino_head(config, extra)
    elif config.markov_rank:
        markov = markov_head(
            _LOCAL_KINDS[config.markov_head_type],
            extra[MARKOV_INPUT],
            extra[MARKOV_OUTPUT],
            _slot_layers(config, extra),
        )
    if config.confidence_size:
        confidence = confidence_head(
            extra[CONFIDENCE_WEIGHT],
            extra[CONFIDENCE_BIAS],
            extra.get(MARKOV_INPUT),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
        )
    return head, extras, markov, confidence


def confidence_head(
    weight: torch.Tensor,
    bias: torch.Tensor,
    w1: torch.Tensor | None,
    *,
    vocab_size: int,
    hidden_size: int,
) -> ConfidenceHead:
    """Returns the head with weight [1, H] or [1, H + r] and bias [1]; w1 [V, r] is the Markov
    head's."""
    of_state, of_rank = weight[0].float().split((hidden_size, weight.shape[1] - hidden_size))
    of_token = torch.zeros(vocab_size)
    if len(of_rank):
        assert w1 is not None
        of_token = w1.float() @ of_rank
    return ConfidenceHead(of_state.contiguous(), bias[0].float(), of_token, CONFIDENCE_POWER)


def _slot_layers(
    config: DSparkConfig, extra: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the parts of a gated or recurrent Markov head's layer, by their names in a local
    head; none for a plain Markov head."""
    layer = MARKOV_LAYERS.get(config.markov_head_type)
    if layer is None:
        return {}
    widths = layer.widths(config.markov_rank, config.hidden_size)
    columns = extra[f"{layer.name}.weight"].split(widths, dim=1)
    tensors = {
        f"{part}.weight": weight.contiguous()
        for part, weight in zip(layer.parts, columns, strict=True)
    }
    return {**tensors, "slot_proj.bias": extra[f"{layer.name}.bias"]}


def domino_head(config: DSparkConfig, extra: Mapping[str, torch.Tensor]) -> LocalHead:
    """Returns Domino's head: a GRU over the branch's embeddings, whose state and the slot's state
    are projected together to a rank vector."""
    hidden = config.hidden_size
    local = LocalHeadConfig(
        kind="gru",
        vocab_size=config.vocab_size,
        target_hidden_size=hidden,
        rank=config.markov_rank,
        hidden_size=config.gru_hidden_dim,
        draft_vocab_size=config.draft_vocab_size,
        anchor_input=True,
        slot_size=hidden,
    )
    of_slot, of_state = extra[DOMINO_INPUT].split((hidden, config.gru_hidden_dim), dim=1)
    tensors = {
        **{name: extra[name] for name in DOMINO_GRU},
        "rank_proj.weight": of_state.contiguous(),
        "slot_proj.weight": of_slot.contiguous(),
        "low_rank_lm_head.weight": extra[DOMINO_OUTPUT],
    }
    return load_module(lambda: LocalHead(local), tensors)


def markov_head(
    kind: LocalHeadKind,
    w1: torch.Tensor,
    w2: torch.Tensor,
    slot_layers: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> LocalHead:
    """Returns the local head that adds W_2 v to the scores after token y. Without `slot_layers`, v
    is W_1[y].

    Args:
        w1: [V, r] by target token.
        w2: [V', r] by draft id.
        slot_layers: tensors of the local head that compute v from W_1[y] and the block's states.
    """
    config = LocalHeadConfig(
        kind=kind,
        vocab_size=w1.shape[0],
        # Unused: the head reads neither the target's embedding nor its LM head.
        target_hidden_size=w1.shape[1],
        rank=w1.shape[1],
        draft_vocab_size=w2.shape[0],
        parameterization="direct_vocab",
        anchor_input=True,
        slot_size=slot_layers["slot_proj.weight"].shape[1] if slot_layers else 0,
    )
    tensors = {"embed_tokens.weight": w1, "low_rank_lm_head.weight": w2, **slot_layers}
    return load_module(lambda: LocalHead(config), tensors)


def save_dspark_head(
    directory: str | Path,
    head: BlockHead,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    confidence: tuple[torch.Tensor, torch.Tensor] | None = None,
    target: HeadTarget | None = None,
    target_ids: torch.Tensor | None = None,
    lm_head: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes a head with DeepSpec's names, without the target's tables; see `save_block_head`.

    Args:
        confidence: weight [1, H + r] and bias [1] of the confidence head, which reads the state and
            W_1 of the previous token; without W_1 the weight is [1, H].
    """
    extra = {MARKOV_INPUT: w1, MARKOV_OUTPUT: w2}
    if confidence is not None:
        extra[CONFIDENCE_WEIGHT], extra[CONFIDENCE_BIAS] = confidence
    own = {
        "markov_rank": w1.shape[1],
        "confidence_size": 0 if confidence is None else confidence[0].shape[1],
    }
    config = DSparkConfig(**{**vars(head.config), **own})
    return save_block_head(
        directory, head, config=config, extra=extra, target=target, target_ids=target_ids,
        lm_head=lm_head, dtype=dtype,
    )  # fmt: skip
