# SPDX-License-Identifier: Apache-2.0
"""Packs many anchors of a few sequences into one training batch, and computes its attention.

A block with anchor position p attends the context before p and its own slots, which in a causal
head attend only earlier slots. Blocks do not attend each other. Scores against the context are one
GEMM per sequence, scores inside blocks are small batched products. One softmax takes both, so there
is no mask over all slots of all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.order import random_subset


class Segment(NamedTuple):
    """The blocks of one sequence: its numbers of block rows and context rows (segments are
    consecutive), and the context mask of each block."""

    rows: int
    context: int
    # [num_blocks, S] additive, 0 or -inf
    context_mask: torch.Tensor


class BlockBatch(NamedTuple):
    """Blocks of several sequences, b slots each (A anchors in all, T context tokens).

    anchor_tokens int64 [A]; positions int64 [A*b]; aux [T, L*Ht]; context_positions int64 [T];
    teacher [A*D, Ht] and labels int64 [A*D] of the D tokens after each anchor (target token ids);
    valid bool [A*D]: whether the token exists.
    """

    block_size: int
    anchor_tokens: torch.Tensor
    positions: torch.Tensor
    aux: torch.Tensor
    context_positions: torch.Tensor
    segments: tuple[Segment, ...]
    teacher: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor


def anchor_range(sequence: FeatureSequence) -> range:
    """Returns the anchors with at least one token to predict, from the first answer token on."""
    return range(sequence.prompt_len, len(sequence.tokens) - 1)


def sample_anchors(
    sequence: FeatureSequence, stride: int, generator: torch.Generator
) -> torch.Tensor:
    """Returns one random anchor of every `stride` consecutive answer positions, int64 [A]
    ascending.
    """
    legal = anchor_range(sequence)
    starts = torch.arange(legal.start, legal.stop, stride)
    jitter = torch.randint(0, stride, starts.shape, generator=generator)
    anchors = starts + jitter
    return anchors[anchors < legal.stop]


def thin_anchors(anchors: torch.Tensor, multiple: int, generator: torch.Generator) -> torch.Tensor:
    """Returns the anchors without random ones, so that their number is a multiple of `multiple`;
    fewer anchors than that are all kept.

    With few distinct shapes, the GEMM library reuses its compiled kernels.
    """
    if len(anchors) < multiple:
        return anchors
    return random_subset(anchors, len(anchors) // multiple * multiple, generator)


def pack_blocks(
    sequences: Sequence[FeatureSequence],
    anchors: Sequence[torch.Tensor],
    block_size: int,
    context_multiple: int = 1,
    first_slot: int = 1,
) -> BlockBatch:
    """Returns one batch of sequences and their anchors (ascending, at least one each).

    The slots from `first_slot` on predict the tokens after the anchor. Context after the last
    anchor is dropped. The rest is padded to `context_multiple` with rows that no block attends.
    """
    offsets = torch.arange(block_size)
    names = ("anchor", "position", "aux", "context", "teacher", "label", "valid")
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    segments: list[Segment] = []
    for sequence, at in zip(sequences, anchors, strict=True):
        seen = int(at[-1])
        padding = -seen % context_multiple
        slots = at[:, None] + offsets
        drafted = at[:, None] + 1 + offsets[: block_size - first_slot]
        inside = drafted < len(sequence.tokens)
        safe = drafted.clamp_max(len(sequence.tokens) - 1)
        parts["anchor"].append(sequence.tokens[at])
        parts["position"].append(slots.flatten())
        parts["aux"].append(F.pad(sequence.aux[:seen], (0, 0, 0, padding)))
        parts["context"].append(torch.arange(seen + padding))
        # Row p - 1 of the final hidden states predicts token p.
        parts["teacher"].append(sequence.hidden[(safe - 1).flatten()])
        parts["label"].append(sequence.tokens[safe.flatten()])
        parts["valid"].append(inside.flatten())
        # The last anchor is at `seen`, so the mask of every block excludes the padding.
        hidden_future = torch.arange(seen + padding)[None, :] >= at[:, None]
        mask = torch.zeros(hidden_future.shape).masked_fill_(hidden_future, float("-inf"))
        segments.append(Segment(slots.numel(), seen + padding, mask))
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    return BlockBatch(
        block_size=block_size,
        anchor_tokens=joined["anchor"],
        positions=joined["position"],
        aux=joined["aux"],
        context_positions=joined["context"],
        segments=tuple(segments),
        teacher=joined["teacher"],
        labels=joined["label"],
        valid=joined["valid"],
    )


def block_attention(
    # [R, Hq, Dh] rows of whole blocks of one sequence
    query: torch.Tensor,
    # [R, Hkv, Dh]
    key: torch.Tensor,
    # [R, Hkv, Dh]
    value: torch.Tensor,
    # [S, Hkv, Dh]
    context_key: torch.Tensor,
    # [S, Hkv, Dh]
    context_value: torch.Tensor,
    # [A, S]
    context_mask: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Returns the attention of block slots over their context and their own block, [R, Hq, Dh]."""
    rows, heads, dim = query.shape
    kv_heads, blocks, context = key.shape[1], rows // block_size, context_key.shape[0]
    group = heads // kv_heads
    # [Hkv, A, b * group, Dh]: queries of one block are neighbours
    q = (query * scale).view(blocks, block_size, kv_heads, group, dim)
    q = q.permute(2, 0, 1, 3, 4).reshape(kv_heads, blocks, block_size * group, dim)
    k = key.view(blocks, block_size, kv_heads, dim).permute(2, 0, 1, 3)
    v = value.view(blocks, block_size, kv_heads, dim).permute(2, 0, 1, 3)
    far = torch.bmm(q.reshape(kv_heads, -1, dim), context_key.permute(1, 2, 0))
    far = far.view(kv_heads, blocks, -1, context) + context_mask.to(far.dtype)[:, None, :]
    near = q @ k.transpose(-1, -2)
    if causal:
        later = torch.ones(block_size, block_size, dtype=torch.bool, device=q.device).triu(1)
        near = near.masked_fill(later.repeat_interleave(group, 0), float("-inf"))
    weights = torch.softmax(torch.cat((far, near), -1), -1)
    far, near = weights.split((context, block_size), -1)
    mixed = torch.bmm(far.reshape(kv_heads, -1, context), context_value.transpose(0, 1))
    mixed = mixed.view(kv_heads, blocks, -1, dim) + near @ v
    mixed = mixed.view(kv_heads, blocks, block_size, group, dim)
    return mixed.permute(1, 2, 0, 3, 4).reshape(rows, heads, dim)


def run_blocks(head: BlockHead, batch: BlockBatch, embed_tokens: torch.Tensor) -> torch.Tensor:
    """Returns the final normed hidden states of the slots that draft, [A*D, H]; `embed_tokens`
    [V, H] is frozen."""
    config, size = head.config, batch.block_size
    features = head.context_features(batch.aux)
    keys, values = (kv.unbind() for kv in head.context_kv(features, batch.context_positions))

    rows = [s.rows for s in batch.segments]
    context = [s.context for s in batch.segments]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # split, not slices: the gradient of each slice would be a full-size tensor of zeros.
        pieces = zip(
            q.split(rows),
            k.split(rows),
            v.split(rows),
            keys[layer].split(context),
            values[layer].split(context),
            batch.segments,
            strict=True,
        )
        return torch.cat(
            [
                block_attention(
                    *tensors,  # type: ignore[misc]  # five of them
                    segment.context_mask,
                    block_size=size,
                    scale=config.attention_scale,
                    causal=config.causal,
                )
                for *tensors, segment in pieces
            ]
        )

    embeds = head.block_embeds(embed_tokens[batch.anchor_tokens].to(features.dtype), size)
    hidden = head(embeds.flatten(0, 1), batch.positions, attend)
    return hidden.view(-1, size, config.hidden_size)[:, config.first_slot :].flatten(0, 1)
