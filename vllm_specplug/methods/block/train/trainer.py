# SPDX-License-Identifier: Apache-2.0
"""Training of a block head (JetSpec: causal, DFlash: bidirectional) from cached features.

Each step packs blocks of several sequences and distils the target's distribution, or its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.blocks import (
    BlockBatch,
    pack_blocks,
    run_blocks,
    sample_anchors,
    thin_anchors,
)
from vllm_specplug.train.features import FeatureSequence, FeatureStore
from vllm_specplug.train.losses import LOSSES, head_loss, position_weights
from vllm_specplug.train.order import DataOrder, random_subset
from vllm_specplug.train.recipe import Recipe
from vllm_specplug.train.trainer import StepLoss, Trainer

# Shapes are rounded so that the GEMM library's cache of compiled kernels is hit.
_ANCHOR_MULTIPLE, _CONTEXT_MULTIPLE = 8, 64
# Block size -> decay of the loss along the block, of the DFlash trainers.
_DFLASH_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(config: BlockHeadConfig) -> float:
    """Decay of the loss along a block: 4 for causal heads; for bidirectional ones 4 at block size
    8, 5 at 10, 7 at 16, linear between and in proportion outside."""
    if config.causal:
        return 4.0
    block_size, sizes = config.block_size, sorted(_DFLASH_GAMMA)
    low, high = sizes[0], sizes[-1]
    if block_size < low or block_size > high:
        edge = low if block_size < low else high
        return _DFLASH_GAMMA[edge] * block_size / edge
    return float(np.interp(block_size, sizes, [_DFLASH_GAMMA[s] for s in sizes]))


@dataclass(frozen=True)
class TrainOptions(Recipe):
    """Recipe of a block head's run. `position_gamma` None stands for `default_gamma`."""

    loss: str = "forward_kl"
    temperature: float = 1.0
    position_gamma: float | None = None
    regression_weight: float = 0.0
    anchors_per_step: int = 640
    anchor_stride: int = 3
    short_block_size: int = 0
    short_block_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_of("loss", LOSSES)
        self.require_least(anchors_per_step=1, anchor_stride=1)
        self.require_positive("temperature")
        self.require_share("short_block_share")


class Drafting(nn.Module):
    """The head with its frozen tables, so that one forward is a whole training forward."""

    def __init__(self, head: BlockHead, embed_tokens: torch.Tensor):
        super().__init__()
        self.head = head
        self.embed_tokens: torch.Tensor
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)

    def forward(self, batch: BlockBatch) -> torch.Tensor:
        """[A*D, H], final normed states of the slots that draft."""
        return run_blocks(self.head, batch, self.embed_tokens)


def draw_blocks(
    trainer: Trainer,
    store: FeatureStore,
    config: BlockHeadConfig,
    block_size: int,
    wanted: int,
    anchor_stride: int,
    generator: torch.Generator,
) -> BlockBatch:
    """`wanted` blocks of the next sequences of a trainer, one per `anchor_stride` tokens."""
    sequences: list[FeatureSequence] = []
    anchors: list[torch.Tensor] = []
    count = 0
    while count < wanted:
        sequence = store[trainer.next_index()]
        at = sample_anchors(sequence, anchor_stride, generator)
        at = thin_anchors(at, _ANCHOR_MULTIPLE, generator)
        at = random_subset(at, wanted - count, generator)
        if len(at):
            sequences.append(sequence)
            anchors.append(at)
            count += len(at)
    return pack_blocks(sequences, anchors, block_size, _CONTEXT_MULTIPLE, config.first_slot)


class BlockTrainer(Trainer):
    """Trains a block head.

    Args:
        head: initialised head.
        embed_tokens: [V, H]; draft_lm_head: [V', H] rows of the target's LM head;
        target_ids: int64 [V'] token of each draft id.
    """

    options: TrainOptions

    def __init__(
        self,
        head: BlockHead,
        store: FeatureStore,
        options: TrainOptions,
        *,
        embed_tokens: torch.Tensor,
        draft_lm_head: torch.Tensor,
        target_ids: torch.Tensor,
        accelerator: Accelerator | None = None,
    ):
        if options.short_block_share > 0 and not head.config.causal:
            raise ValueError(
                f"short_block_share = {options.short_block_share}, legal: 0 for a bidirectional "
                "head, whose slots attend the whole block: shorter blocks are another task; "
                "leave it out"
            )
        if options.position_gamma is None:
            options = replace(options, position_gamma=default_gamma(head.config))
        drafting = Drafting(head.float(), embed_tokens.to(torch.bfloat16))
        super().__init__(head, drafting, DataOrder(store, options.seed), options, accelerator)
        self.head, self.store = head, store
        self.lm_head = draft_lm_head.to(self.device, torch.bfloat16)
        self.to_draft = torch.full((embed_tokens.shape[0],), -1, dtype=torch.int64)
        self.to_draft[target_ids] = torch.arange(len(target_ids))
        if options.compile:
            compile_head(self.head)

    def next_batch(self) -> BlockBatch:
        """The blocks of the next step on this process."""
        options = self.options
        generator = self.step_generator()
        size = self.head.config.block_size
        short = torch.rand((), generator=generator).item() < options.short_block_share
        if short and options.short_block_size >= 2:
            size = options.short_block_size
        wanted = options.anchors_per_step * self.head.config.block_size // size
        return draw_blocks(
            self, self.store, self.head.config, size, wanted, options.anchor_stride, generator
        )

    def step_loss(self) -> StepLoss:
        options = self.options
        assert options.position_gamma is not None
        batch = self.next_batch()
        weights = position_weights(batch.block_size - 1, options.position_gamma)
        weights = weights.repeat(len(batch.anchor_tokens)) * batch.valid
        weights /= weights.sum()
        labels = self.to_draft[batch.labels]
        batch = batch.to(self.device)
        weights, labels = weights.to(self.device), labels.to(self.device)
        with self.accelerator.autocast():
            hidden = self.forward_module(batch)
        loss = head_loss(
            hidden.to(torch.bfloat16),
            batch.teacher,
            self.lm_head,
            labels,
            weights,
            options.loss,
            options.temperature,
            compiled=options.compile,
        )
        total = loss
        if options.regression_weight > 0:
            distance = F.smooth_l1_loss(hidden.float(), batch.teacher.float(), reduction="none")
            total = loss + options.regression_weight * (distance.mean(-1) * weights).sum()
        return StepLoss(total, loss, int(batch.valid.sum()), len(batch.positions))

    def drafting_embeds(self) -> torch.Tensor:
        """The frozen token embeddings, on the training device."""
        return self.accelerator.unwrap_model(self.forward_module).embed_tokens

    def averaged_head(self) -> BlockHead:
        """A copy of the head with the averaged weights."""
        with torch.device("meta"):
            head = BlockHead(self.head.config)
        head.load_state_dict(self.averaged_weights(), assign=True)
        return head.eval()


def compile_head(head: BlockHead) -> None:
    """Fuses the elementwise work around the GEMMs with torch.compile (dynamic shapes)."""
    compiled: Callable[..., Any] = torch.compile
    for layer in head.layers:
        layer.project = compiled(layer.project, dynamic=True)
        layer.finish = compiled(layer.finish, dynamic=True)
        layer.self_attn.key_value = compiled(layer.self_attn.key_value, dynamic=True)
    head.context_features = compiled(head.context_features, dynamic=True)  # type: ignore
