# SPDX-License-Identifier: Apache-2.0
"""Block heads at the start of a training: new ones with the target's layer shape and weights, or
those of another head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.methods.block.checkpoint import BlockHeadExtras
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.speculators_format import HeadTarget
from vllm_specplug.methods.block.train.options import AnyBlockRun
from vllm_specplug.train.options import Recipe
from vllm_specplug.train.run import Training, continued_ids, draft_ids, layer_scales
from vllm_specplug.train.target import (
    TargetTables,
    TargetWeights,
    decoder_of,
    layer_norms,
    norm_gains,
)


def head_config_for(
    target: dict[str, Any],
    target_layer_ids: Sequence[int],
    *,
    num_layers: int,
    block_size: int,
    draft_vocab_size: int,
    intermediate_size: int | None = None,
    causal: bool = True,
    mask_token_id: int | None = None,
) -> BlockHeadConfig:
    """Returns the shape of a head with the target's layer shape.

    Raises:
        ValueError: for a mask that is no token of the target.
    """
    check_mask_token(mask_token_id, target["vocab_size"])
    rope = target.get("rope_parameters") or {}
    heads = target["num_attention_heads"]
    return BlockHeadConfig(
        hidden_size=target["hidden_size"],
        intermediate_size=intermediate_size or target["intermediate_size"],
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=target.get("num_key_value_heads") or heads,
        head_dim=target.get("head_dim") or target["hidden_size"] // heads,
        vocab_size=target["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target["hidden_size"],
        target_layer_ids=tuple(target_layer_ids),
        block_size=block_size,
        causal=causal,
        mask_token_id=mask_token_id,
        rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or target.get("rope_theta") or 10000.0),
        max_position_embeddings=_longest(target),
    )


def check_mask_token(token: int | None, vocab_size: int) -> None:
    """Raises ValueError for a mask that is no token of the target."""
    if token is not None and not 0 <= token < vocab_size:
        raise ValueError(
            f"--mask-token-id {token}, legal: 0..{vocab_size - 1} (the target's tokens); name one "
            "of them"
        )


def speculators_target(
    training: Training, config: BlockHeadConfig, target_ids: torch.Tensor
) -> HeadTarget | None:
    """Returns the target to write a head for in the format of speculators. None for a head whose
    masks read a trained vector, which that format cannot hold.

    Raises:
        ValueError: if speculators cannot load the head.
    """
    if config.mask_token_id is None:
        return None
    return HeadTarget.of(training.run.target, config, target_ids, "--mask-token-id")


def _longest(target: dict[str, Any]) -> int:
    """Returns the maximum length that a head states. vLLM's own methods refuse a head with a
    smaller one than the served one."""
    return int(target.get("max_position_embeddings") or 0)


def new_block(
    run: AnyBlockRun,
    recipe: Recipe,
    training: Training,
    *,
    block_size: int,
    causal: bool,
    sample_from_anchor: bool = False,
) -> tuple[BlockHead, torch.Tensor]:
    """Returns a block from the target's layers, and its draft vocabulary."""
    layers, width = training.store.target_layer_ids, training.new_width(run.intermediate_size)
    ids = draft_ids(training, run.draft_vocab_size, run.vocab_from)
    config = head_config_for(
        training.weights.config,
        layers,
        num_layers=run.num_layers,
        block_size=block_size,
        draft_vocab_size=len(ids),
        intermediate_size=width,
        causal=causal,
        mask_token_id=run.mask_token_id,
    )
    head = BlockHead(replace(config, sample_from_anchor=sample_from_anchor))
    generator = torch.Generator().manual_seed(recipe.seed)
    scales = layer_scales(training.store)
    init_from_target(head, training.weights, training.tables, scales, generator=generator)
    return head, ids


def continued_block(
    init_from: str,
    head: BlockHead,
    extras: BlockHeadExtras,
    training: Training,
    *,
    block_size: int,
    mask_token_id: int | None = None,
    **changes: Any,
) -> tuple[BlockHead, torch.Tensor]:
    """Returns the block of a head to start from, float32, and its draft vocabulary.

    Args:
        init_from: its folder.
        head, extras: what the folder holds.
        block_size: of the new head; 0: the given one's.
        mask_token_id: token whose embedding the masks read; None: they start as the given head's.
        changes: other fields of its config that change no tensor.

    Raises:
        ValueError: for heads that cannot be trained, or not on these features.
    """
    config, layers = head.config, training.store.target_layer_ids
    ids = target_ids_or_all(extras.target_ids, config.vocab_size)
    targets = training.tables
    pairs = ((extras.lm_head, targets.lm_head[ids]), (extras.embed_tokens, targets.embed_tokens))
    own_tables = any(
        own is not None and not torch.equal(own.float(), theirs.float()) for own, theirs in pairs
    )
    problems = {
        f"reads target layers {list(config.target_layer_ids)}, the features hold {list(layers)}; "
        "make features with its layers": config.target_layer_ids != layers,
        "has sliding-window layers, which are not trained; choose another head": bool(
            config.windows
        ),
        "ships another LM head or embeddings than the target's, which are not trained; choose "
        "another head": own_tables,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"--init-from {init_from!r} {problem}")
    head = head.float()
    check_mask_token(mask_token_id, config.vocab_size)
    row = mask_token_id
    if row is None and extras.mask_from_embedding:
        row = config.mask_token_id
    if row is not None:
        head.mask_embedding.data.copy_(training.tables.embed_tokens[row].float())
    trained = BlockHead(
        replace(
            config,
            block_size=block_size or config.block_size,
            mask_token_id=mask_token_id,
            max_position_embeddings=_longest(training.weights.config),
            **changes,
        )
    )
    trained.load_state_dict(head.state_dict())
    return trained, continued_ids(training, ids)


@torch.no_grad()
def copy_layer(source: nn.Module, layer: nn.Module, hidden_size: int) -> None:
    """Copies a target's decoder layer into a draft layer, as far as their tensors match."""
    norms = dict(
        zip(
            ("input_layernorm", "post_attention_layernorm"),
            layer_norms(source, hidden_size),
            strict=True,
        )
    )
    theirs = dict(source.named_modules())
    for name, part in layer.named_modules():
        weight = getattr(part, "weight", None)
        if not isinstance(weight, torch.Tensor):
            continue
        other = norms.get(name, theirs.get(name))
        if weight.dim() == 1:
            gains = None if other is None else norm_gains(other)
            if gains is not None and gains.shape == weight.shape:
                weight.copy_(gains)  # q_norm and k_norm where the target has none: ones
            continue
        tensors = {} if other is None else dict(other.named_parameters(recurse=False))
        for own, parameter in part.named_parameters(recurse=False):
            copy_leading(tensors.get(own), parameter)


@torch.no_grad()
def copy_leading(tensor: torch.Tensor | None, parameter: torch.Tensor) -> None:
    """Copies the leading entries of a target's tensor into a parameter of at most its size. Without
    such a tensor the parameter keeps its values."""
    if tensor is None or tensor.dim() != parameter.dim():
        return
    if all(n >= m for n, m in zip(tensor.shape, parameter.shape, strict=True)):
        parameter.copy_(tensor[tuple(slice(0, size) for size in parameter.shape)])


@torch.no_grad()
def copy_gains(norm: nn.Module | None, parameter: torch.Tensor) -> None:
    """Copies the gains of a target's norm, where there is one."""
    if norm is not None:
        parameter.copy_(norm_gains(norm))


@torch.no_grad()
def init_from_target(
    head: BlockHead,
    weights: TargetWeights,
    tables: TargetTables,
    layer_scales: Sequence[float],
    generator: torch.Generator | None = None,
) -> None:
    """Initialises a head from the target's layers, norms and features.

    Draft layers copy the first one and the last ones: the gains of norms and the tensors that have
    a Llama's names and are large enough. Other tensors, of experts or another attention, keep their
    values. The final norm is the target's, as the LM head expects it. fc is a scaled identity on
    the deepest feature plus noise. A narrower MLP takes the first rows.

    Args:
        layer_scales: root mean square of each selected layer's output; fc undoes it.
    """
    config = head.config
    decoder = decoder_of(weights.load())
    last = len(decoder.layers) - 1
    count = config.num_hidden_layers
    sources = [0, *range(last - count + 2, last + 1)][:count]
    for layer, source in zip(head.layers, sources, strict=True):
        copy_layer(decoder.layers[source], layer, config.target_hidden_size)
    head.norm.weight.copy_(tables.final_norm)
    before, _ = layer_norms(decoder.layers[sources[-1]], config.target_hidden_size)
    copy_gains(before, head.hidden_norm.weight)
    hidden = config.hidden_size
    noise = torch.randn(head.fc.weight.shape, generator=generator) * 0.3 * hidden**-0.5
    head.fc.weight.copy_(noise)
    if config.target_hidden_size == hidden:
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
    for index, scale in enumerate(layer_scales):
        columns = slice(index * config.target_hidden_size, (index + 1) * config.target_hidden_size)
        head.fc.weight[:, columns] /= scale
    embed = tables.embed_tokens.float()
    if config.mask_token_id is not None:
        head.mask_embedding.copy_(embed[config.mask_token_id])
        return
    direction = torch.randn(hidden, generator=generator)
    head.mask_embedding.copy_(embed.mean(0) + direction * embed.std())
