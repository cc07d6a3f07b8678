# SPDX-License-Identifier: Apache-2.0
"""The training objective of an EAGLE-3 head: training-time test (arXiv 2503.01840).

The head runs `steps` times in a row from each anchor. The first run reads the target's state, every
later one the head's output of the previous run; the input is the answer's next token. As in
serving, a run attends the rows of the context up to its anchor, and the earlier runs of the same
anchor. Only anchors are run. Other rows only need their keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_specplug.methods.block.head import Attend
from vllm_specplug.methods.block.train.start import copy_gains, copy_layer, copy_leading
from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.methods.eagle3_tree.train.options import Eagle3Recipe
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.order import random_subset
from vllm_specplug.train.target import TargetTables, TargetWeights, decoder_of, layer_norms
from vllm_specplug.train.trainer import Objective, StepLoss, Trainer
from vllm_specplug.train.vocabulary import DraftTables


class Anchors(NamedTuple):
    """Consecutive sequences and their anchors.

    Row i of a sequence of S tokens takes the token at i + 1; there are S - 1 rows. Run k of the
    anchor in row i takes the token at i + 1 + k and predicts the one at i + 2 + k.
    """

    # [T] token after each row
    inputs: torch.Tensor
    # [T, L * Ht]
    aux: torch.Tensor
    # [T]
    positions: torch.Tensor
    # rows of each sequence
    lengths: tuple[int, ...]
    # [A] rows that are anchors, ascending
    rows: torch.Tensor
    # anchors of each sequence
    counts: tuple[int, ...]
    # [steps, A] token each run takes, token it predicts, and final state of the target that
    # predicts that: [steps, A, Ht]
    tokens: torch.Tensor
    labels: torch.Tensor
    teacher: torch.Tensor
    # bool [steps, A]: whether the answer is long enough for the run
    inside: torch.Tensor


def pack(
    sequences: Sequence[FeatureSequence], anchors: Sequence[torch.Tensor], steps: int
) -> Anchors:
    """Returns joined sequences; `anchors` are rows of each."""
    parts: dict[str, list[torch.Tensor]] = {
        name: []
        for name in ("inputs", "aux", "positions", "rows", "tokens", "labels", "teacher", "inside")
    }
    start = 0
    for sequence, rows in zip(sequences, anchors, strict=True):
        last = len(sequence.tokens) - 1
        runs = rows[None] + torch.arange(steps)[:, None]
        parts["inputs"].append(sequence.tokens[1:])
        parts["aux"].append(sequence.aux[:-1])
        parts["positions"].append(torch.arange(last))
        parts["rows"].append(rows + start)
        parts["tokens"].append(sequence.tokens[(runs + 1).clamp_max(last)])
        parts["labels"].append(sequence.tokens[(runs + 2).clamp_max(last)])
        parts["teacher"].append(sequence.hidden[(runs + 1).clamp_max(last)])
        parts["inside"].append(runs + 2 <= last)
        start += last
    along = {name: 1 if name in ("tokens", "labels", "teacher", "inside") else 0 for name in parts}
    joined: dict[str, Any] = {k: torch.cat(v, dim=along[k]) for k, v in parts.items()}
    return Anchors(
        **joined,
        lengths=tuple(len(sequence.tokens) - 1 for sequence in sequences),
        counts=tuple(len(rows) for rows in anchors),
    )


def run_anchors(head: Eagle3Head, batch: Anchors, embed_tokens: torch.Tensor) -> torch.Tensor:
    """Returns the inputs of the LM head after each run, [steps, A, H]."""
    states = head.features(batch.aux.to(head.fc.weight.dtype))
    key, value = head.context_kv(embed_tokens[batch.inputs], states, batch.positions)
    state, position = states[batch.rows], batch.positions[batch.rows]
    branch: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs = []
    for step, tokens in enumerate(batch.tokens):
        attend = _anchor_attention(key, value, branch, batch, is_first=step == 0)
        output, state = head(embed_tokens[tokens], state, position + step, attend)
        outputs.append(output)
    return torch.stack(outputs)


def _anchor_attention(
    key: torch.Tensor,
    value: torch.Tensor,
    branch: list[tuple[torch.Tensor, torch.Tensor]],
    batch: Anchors,
    is_first: bool,
) -> Attend:
    """Returns the attention of anchors [A] over the context [T] up to their row and over their
    earlier runs."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not is_first:  # the first run's keys are its row of the context
            branch.append((k, v))
        groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        # [A, Hkv, G, Dh]
        grouped = q.unflatten(1, (-1, groups)) * scale
        own = [(torch.einsum("ahgd,ahd->ahg", grouped, bk.to(q.dtype)), bv) for bk, bv in branch]
        mixed, first_row, first_anchor = [], 0, 0
        for length, count in zip(batch.lengths, batch.counts, strict=True):
            rows = slice(first_row, first_row + length)
            anchors = slice(first_anchor, first_anchor + count)
            scores = torch.einsum("ahgd,nhd->ahgn", grouped[anchors], key[rows].to(q.dtype))
            at = batch.rows[anchors] - first_row
            later = torch.arange(length, device=q.device)[None] > at[:, None]
            scores = scores.float().masked_fill(later[:, None, None], -torch.inf)
            tails = [score[anchors, :, :, None].float() for score, _ in own]
            weights = torch.cat([scores, *tails], dim=-1).softmax(-1).to(q.dtype)
            out = torch.einsum("ahgn,nhd->ahgd", weights[..., :length], value[rows].to(q.dtype))
            for i, (_, bv) in enumerate(own):
                weight = weights[..., length + i, None]
                out = out + weight * bv[anchors, :, None].to(q.dtype)
            mixed.append(out.flatten(1, 2))
            first_row, first_anchor = rows.stop, anchors.stop
        return torch.cat(mixed)

    return attend


@dataclass(frozen=True)
class Eagle3Objective(Objective):
    """Trains an EAGLE-3 head: `anchors_per_step` anchors of several sequences make a step; run k of
    an anchor has weight `step_decay` ** k."""

    recipe: Eagle3Recipe

    def draw(self, trainer: Trainer) -> Anchors:
        generator = trainer.step_generator()

        def pick(sequence: FeatureSequence, left: int) -> torch.Tensor:
            # In serving, the anchor is an answer token, and its row has the position before it.
            rows = torch.arange(max(sequence.prompt_len, 1) - 1, len(sequence.tokens) - 2)
            return random_subset(rows, min(left, self.recipe.anchors_per_sequence), generator)

        return pack(*trainer.draw_rows(self.recipe.anchors_per_step, pick), self.recipe.steps)

    def forward(self, head: Eagle3Head, batch: Anchors, embed_tokens: torch.Tensor) -> torch.Tensor:
        return run_anchors(head, batch, embed_tokens)

    def loss(self, trainer: Trainer, batch: Anchors) -> StepLoss:
        recipe, inside = self.recipe, batch.inside
        labels = torch.where(inside, trainer.to_draft[batch.labels], -1)
        runs = torch.arange(recipe.steps, dtype=torch.float32, device=inside.device)
        weights = recipe.step_decay ** runs[:, None] * inside
        weights = weights / weights.sum()
        hidden, teacher = trainer.forward(batch).flatten(0, 1), batch.teacher.flatten(0, 1)
        loss = trainer.distil(recipe, hidden, teacher, labels.flatten(), weights.flatten())
        return StepLoss(loss, loss, int(inside.sum()), batch.tokens.numel())

    def drafts(
        self,
        head: Eagle3Head,
        sequence: FeatureSequence,
        anchors: torch.Tensor,
        tables: DraftTables,
    ) -> torch.Tensor:
        # An anchor's row is that of the position before it.
        batch = pack([sequence], [anchors - 1], self.recipe.steps)
        batch = tables.inputs(batch)
        return tables.likeliest(self.forward(head, batch, tables.embed_tokens)).t()


@torch.no_grad()
def init_eagle3_from_target(
    head: Eagle3Head,
    weights: TargetWeights,
    tables: TargetTables,
    layer_scales: Sequence[float],
    generator: torch.Generator | None = None,
) -> None:
    """Initialises the head from the target's first and last layer, as far as their tensors match.

    The halves of q, k and v that read the state are the last layer's, the halves that read the
    embedding are the first layer's. `fc` is a scaled identity on the deepest state plus noise.

    Args:
        layer_scales: root mean square of each selected layer's output; `fc` undoes it.
    """
    config, layer = head.config, head.layers[0]
    hidden = config.hidden_size
    layers = decoder_of(weights.load()).layers
    first, last = layers[0], layers[-1]
    copy_layer(last, layer, hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        of_embedding, of_state = getattr(layer.self_attn, name).weight.split(hidden, dim=1)
        for source, half in ((first, of_embedding), (last, of_state)):
            copy_leading(dict(source.named_parameters()).get(f"self_attn.{name}.weight"), half)
        of_embedding.mul_(0.5)
    copy_gains(layer_norms(first, hidden)[0], layer.input_layernorm.weight)
    copy_gains(layer_norms(last, hidden)[0], layer.hidden_norm.weight)
    head.norm.weight.copy_(tables.final_norm)
    noise = torch.randn(head.fc.weight.shape, generator=generator) * 0.1 * hidden**-0.5
    head.fc.weight.copy_(noise)
    size = config.target_hidden_size
    for index, scale in enumerate(layer_scales):
        columns = slice(index * size, (index + 1) * size)
        # The residual stream keeps the scale of the deepest state, which the other parts expect.
        head.fc.weight[:, columns] *= layer_scales[-1] / scale
    if size == hidden:
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
