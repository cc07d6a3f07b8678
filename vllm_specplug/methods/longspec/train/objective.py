# SPDX-License-Identifier: Apache-2.0
"""The training objective of a LongSpec layer, on the target's last-layer keys and values.

Flash noisy training (arXiv 2502.17421, section 3.3): in serving, a token drafted at depth d reads a
target cache that ends d + 1 positions before it. So in training, query t attends the target's keys
only up to t - j, with j drawn from 1..max_staleness for each sequence and step. Slices of its
inputs let the plain causal kernel compute this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vllm_specplug.methods.block.train.start import copy_gains, copy_layer
from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.features import KVSequence
from vllm_specplug.methods.longspec.train.options import LongSpecRecipe
from vllm_specplug.train.target import TargetWeights, decoder_of, layer_norms
from vllm_specplug.train.trainer import Objective, StepLoss, Trainer
from vllm_specplug.train.vocabulary import DraftTables

_ROW_MULTIPLE = 512
# Drafts of a chain on held-out answers.
CHAIN_DEPTH = 5


class PackedSequences(NamedTuple):
    """Consecutive sequences: tokens, positions [T], key, value [T, Hkv, Dh], hidden [T, Ht];
    `lengths` and `staleness` of each sequence; `rows` [N] supervised positions and `labels` [N] the
    tokens that follow them."""

    tokens: torch.Tensor
    positions: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    hidden: torch.Tensor
    lengths: tuple[int, ...]
    staleness: tuple[int, ...]
    rows: torch.Tensor
    labels: torch.Tensor


def pack(
    sequences: Sequence[KVSequence], staleness: Sequence[int], multiple: int = 1
) -> PackedSequences:
    """Returns joined sequences, whose rows are supervised from the last prompt token on.

    A sequence of zeros without supervision pads the rows to a `multiple`, because matrix libraries
    compile and keep kernels for every number of rows.
    """
    rows, labels, start = [], [], 0
    for sequence in sequences:
        at = torch.arange(max(sequence.prompt_len, 1) - 1, len(sequence) - 1)
        rows.append(at + start)
        labels.append(sequence.tokens[at + 1])
        start += len(sequence)

    padding = -start % multiple
    more = bool(padding)

    def joined(name: str) -> torch.Tensor:
        parts = [getattr(sequence, name) for sequence in sequences]
        return torch.cat([*parts, parts[0].new_zeros(padding, *parts[0].shape[1:])])

    return PackedSequences(
        joined("tokens"),
        joined("positions"),
        joined("key"),
        joined("value"),
        joined("hidden"),
        (*(len(sequence) for sequence in sequences), *[padding] * more),
        (*staleness, *[1] * more),
        torch.cat(rows),
        torch.cat(labels),
    )


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., S, Hq, Dh], [..., L, Hkv, Dh] twice -> [..., S, Hq, Dh]; causal without a mask."""
    q, k, v = (x.transpose(-2, -3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(-2, -3)


def window_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> torch.Tensor:
    """Attends from row t to itself and the previous `window` rows; [S, heads, Dh] -> [S, Hq, Dh].

    Longer sequences are split into chunks of `window` rows, each of which attends the previous one.
    """
    length = query.shape[0]
    if length <= window + 1:
        return attention(query[None], key[None], value[None])[0]
    padding = -length % window
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (query, key, value))
    q = q.unflatten(0, (-1, window))
    # Two chunks of keys for each chunk of queries; the first one's predecessor is padding.
    pairs = []
    for x in (k, v):
        chunks = x.unflatten(0, (-1, window))
        before = torch.cat((torch.zeros_like(chunks[:1]), chunks[:-1]))
        pairs.append(torch.cat((before, chunks), dim=1))
    row = torch.arange(window, device=q.device)[:, None] + window
    column = torch.arange(2 * window, device=q.device)[None]
    band = (column <= row) & (column >= row - window)
    mask = band.expand(q.shape[0], -1, -1).clone()
    mask[0, :, :window] = False
    out = attention(q, pairs[0], pairs[1], mask[:, None])
    return out.flatten(0, 1)[:length]


def stale_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, staleness: int
) -> torch.Tensor:
    """Attends from row t to rows up to t - `staleness` (>= 1); rows without any are zero."""
    length = query.shape[0]
    out = query.new_zeros(query.shape)
    if length > staleness:
        seen = attention(query[None, staleness:], key[None, :-staleness], value[None, :-staleness])
        out = torch.cat((out[:staleness], seen[0].to(out.dtype)))
    return out


def run_packed(
    head: LongSpecHead, batch: PackedSequences, embed_tokens: torch.Tensor
) -> torch.Tensor:
    """Returns the states [T, H] of all rows of a batch."""
    window = head.config.window_size

    def self_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(batch.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([window_attention(pq, pk, pv, window) for pq, pk, pv in parts])

    def cross_attend(q: torch.Tensor) -> torch.Tensor:
        parts = zip(
            q.split(batch.lengths),
            batch.key.to(q.dtype).split(batch.lengths),
            batch.value.to(q.dtype).split(batch.lengths),
            batch.staleness,
            strict=True,
        )
        return torch.cat([stale_attention(*part) for part in parts])

    embeds = embed_tokens[batch.tokens]
    return head(embeds, batch.positions, self_attend, cross_attend)


@dataclass(frozen=True)
class LongSpecObjective(Objective):
    """Trains a draft layer. `gradient_checkpointing` is for sequences whose activations do not fit
    in memory."""

    # A pass runs the whole sequence, whatever the anchors.
    anchors_per_batch: ClassVar[int] = 0

    recipe: LongSpecRecipe

    def draw(self, trainer: Trainer) -> PackedSequences:
        generator = trainer.step_generator()
        sequences, _ = trainer.draw_rows(
            self.recipe.tokens_per_step, lambda sequence, left: sequence.tokens
        )
        staleness = torch.randint(
            1, self.recipe.max_staleness + 1, (len(sequences),), generator=generator
        )
        return pack(sequences, staleness.tolist(), _ROW_MULTIPLE)

    def forward(
        self, head: LongSpecHead, batch: PackedSequences, embed_tokens: torch.Tensor
    ) -> torch.Tensor:
        if self.recipe.gradient_checkpointing:
            return checkpoint(run_packed, head, batch, embed_tokens, use_reentrant=False)
        return run_packed(head, batch, embed_tokens)

    def loss(self, trainer: Trainer, batch: PackedSequences) -> StepLoss:
        rows, count = batch.rows, len(batch.rows)
        hidden, labels = trainer.forward(batch)[rows], trainer.to_draft[batch.labels]
        weights = torch.full((count,), 1.0 / count, device=trainer.device)
        loss = trainer.distil(self.recipe, hidden, batch.hidden[rows], labels, weights)
        return StepLoss(loss, loss, supervised=count, slots=len(batch.tokens))

    def drafts(
        self, head: LongSpecHead, sequence: KVSequence, anchors: torch.Tensor, tables: DraftTables
    ) -> torch.Tensor:
        # A row at depth d whose target cache ends d + 1 positions earlier reads what serving reads.
        found = []
        for depth in range(CHAIN_DEPTH):
            batch = tables.inputs(pack([sequence], [depth + 1]))
            states = run_packed(head, batch, tables.embed_tokens)
            rows = (anchors + depth).clamp_max(len(sequence) - 1)
            found.append(tables.likeliest(states[rows]))
        return torch.stack(found, 1)


@torch.no_grad()
def init_longspec_from_target(head: LongSpecHead, weights: TargetWeights) -> None:
    """Initialises the layer from the target's last layer as far as their tensors match: its
    attention for both attentions, its norms and MLP, and the final norm if the head has one.

    So the cross-attention starts with queries for the keys that it reads. The self-attention's
    output is scaled by 0.1: its keys come from raw embeddings, which the target's last layer never
    reads.
    """
    own, cross = head.self_attn, head.cross_attn
    for linear in (own.q_proj, own.k_proj, own.v_proj):
        if linear.bias is not None:
            linear.bias.zero_()
    hidden, decoder = head.config.hidden_size, decoder_of(weights.load())
    last = decoder.layers[-1]
    copy_layer(last, head, hidden)
    cross.q_proj.load_state_dict(own.q_proj.state_dict())
    cross.o_proj.load_state_dict(own.o_proj.state_dict())
    own.o_proj.weight.mul_(0.1)
    before_attention, before_mlp = layer_norms(last, hidden)
    copy_gains(before_attention, head.post_self_attention_layernorm.weight)
    copy_gains(before_mlp, head.post_cross_attention_layernorm.weight)
    if head.config.final_norm:
        copy_gains(decoder.final_norm, head.norm.weight)
