# SPDX-License-Identifier: Apache-2.0
"""Training an EAGLE-3 head on what it will meet while drafting.

Training-time test (arXiv 2503.01840): an anchor is run `steps` times in a row. The first run reads
the target's state, every later one the head's own output of the run before, with the answer's next
token as input. A run attends what it would attend in serving: the rows of the context up to its
anchor, and the earlier runs of the same anchor. Only anchors are run; rows that are context alone
need their keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from vllm_specplug.methods.eagle3_tree.head import Attend, Eagle3Head
from vllm_specplug.train.features import FeatureSequence, FeatureStore
from vllm_specplug.train.losses import LOSSES, head_loss
from vllm_specplug.train.order import DataOrder, random_subset
from vllm_specplug.train.recipe import Recipe
from vllm_specplug.train.target import TargetTables, TargetWeights
from vllm_specplug.train.trainer import StepLoss, Trainer


@dataclass(frozen=True)
class Eagle3Recipe(Recipe):
    """`anchors_per_step` anchors of several sequences make a step; run k of an anchor has weight
    `step_decay` ** k."""

    loss: str = "forward_kl"
    temperature: float = 1.0
    steps: int = 5
    step_decay: float = 0.8
    anchors_per_step: int = 512
    anchors_per_sequence: int = 96

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_of("loss", LOSSES)
        self.require_least(steps=1, anchors_per_step=1, anchors_per_sequence=1)
        self.require_positive("temperature", "step_decay")


@dataclass(frozen=True)
class Anchors:
    """Sequences one after the other, and the rows in them that are run.

    Row i of a sequence of S tokens takes the token at i + 1; there are S - 1. Run k of the anchor
    in row i takes the token at i + 1 + k and predicts the one at i + 2 + k.
    """

    # [T] token after each row
    inputs: torch.Tensor
    # [T, L * Ht]
    aux: torch.Tensor
    # [T]
    positions: torch.Tensor
    # rows of each sequence
    lengths: list[int]
    # [A] rows that are anchors, ascending
    rows: torch.Tensor
    # anchors of each sequence
    counts: list[int]
    # [steps, A] token each run takes, token it predicts, and final state of the target that
    # predicts that: [steps, A, Ht]
    tokens: torch.Tensor
    labels: torch.Tensor
    teacher: torch.Tensor
    # bool [steps, A]: whether the answer is long enough for the run
    inside: torch.Tensor

    def to(self, device: torch.device) -> Anchors:
        """The same on another device."""
        moved: dict[str, Any] = {
            k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)
        }
        return replace(self, **moved)


def pack(
    sequences: Sequence[FeatureSequence], anchors: Sequence[torch.Tensor], steps: int
) -> Anchors:
    """Joins sequences; `anchors` are rows of each."""
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
        lengths=[len(sequence.tokens) - 1 for sequence in sequences],
        counts=[len(rows) for rows in anchors],
    )


def run_anchors(head: Eagle3Head, batch: Anchors, embed_tokens: torch.Tensor) -> torch.Tensor:
    """What the LM head reads after each run, [steps, A, H]."""
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
    """Anchors [A] over the context [T] up to their row and the earlier runs of their own."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
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


class _Drafting(nn.Module):
    """The head with its frozen table, so that one forward is a whole training forward."""

    def __init__(self, head: Eagle3Head, embed_tokens: torch.Tensor):
        super().__init__()
        self.head = head
        self.embed_tokens: torch.Tensor
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)

    def forward(self, batch: Anchors) -> torch.Tensor:
        return run_anchors(self.head, batch, self.embed_tokens)


class Eagle3Trainer(Trainer):
    """One training run of an EAGLE-3 head.

    Args:
        head: initialised head.
        embed_tokens: [V, H]; draft_lm_head: [V', H] rows of the target's LM head, frozen;
        target_ids: int64 [V'] token of each draft id.
    """

    def __init__(
        self,
        head: Eagle3Head,
        store: FeatureStore,
        options: Eagle3Recipe,
        *,
        embed_tokens: torch.Tensor,
        draft_lm_head: torch.Tensor,
        target_ids: torch.Tensor,
        accelerator: Accelerator | None = None,
    ):
        drafting = _Drafting(head, embed_tokens.to(torch.bfloat16))
        super().__init__(head, drafting, DataOrder(store, options.seed), options, accelerator)
        self.store, self.recipe, self.head = store, options, head
        self.lm_head = draft_lm_head.to(self.device, torch.bfloat16)
        self.to_draft = torch.full((embed_tokens.shape[0],), -1, dtype=torch.int64)
        self.to_draft[target_ids] = torch.arange(len(target_ids))

    def next_batch(self) -> Anchors:
        """The anchors of the next step on this process."""
        generator = self.step_generator()
        sequences: list[FeatureSequence] = []
        anchors: list[torch.Tensor] = []
        wanted = self.recipe.anchors_per_step
        while wanted > 0:
            sequence = self.store[self.next_index()]
            # While serving, the anchor is an answer token: its row stands before it.
            rows = torch.arange(max(sequence.prompt_len, 1) - 1, len(sequence.tokens) - 2)
            rows = random_subset(rows, min(wanted, self.recipe.anchors_per_sequence), generator)
            if len(rows):
                sequences.append(sequence)
                anchors.append(rows)
                wanted -= len(rows)
        return pack(sequences, anchors, self.recipe.steps)

    def step_loss(self) -> StepLoss:
        batch = self.next_batch()
        labels = torch.where(batch.inside, self.to_draft[batch.labels], -1)
        weights = self.recipe.step_decay ** torch.arange(self.recipe.steps, dtype=torch.float32)
        weights = weights[:, None] * batch.inside
        weights = weights / weights.sum()
        batch = batch.to(self.device)
        with self.accelerator.autocast():
            hidden = self.forward_module(batch)
        loss = head_loss(
            hidden.flatten(0, 1).to(torch.bfloat16),
            batch.teacher.flatten(0, 1),
            self.lm_head,
            labels.flatten().to(self.device),
            weights.flatten().to(self.device),
            self.recipe.loss,
            self.recipe.temperature,
            compiled=self.recipe.compile,
        )
        supervised = int(batch.inside.sum())
        return StepLoss(loss, loss, supervised=supervised, slots=batch.tokens.numel())

    def averaged_head(self) -> Eagle3Head:
        """A copy of the head with the averaged weights."""
        with torch.device("meta"):
            head = Eagle3Head(self.head.config)
        head.load_state_dict(self.averaged_weights(), assign=True)
        return head.eval()


@torch.no_grad()
def init_eagle3_from_target(
    head: Eagle3Head,
    weights: TargetWeights,
    tables: TargetTables,
    layer_scales: Sequence[float],
    generator: torch.Generator | None = None,
) -> None:
    """Starts the head as the target's last layer over its states, and its first over the token.

    The halves of q, k and v that read the state are the last layer's, those that read the
    embedding are the first layer's; `fc` is a scaled identity on the deepest state plus noise.

    Args:
        layer_scales: root mean square of each selected layer's output; `fc` undoes it.
    """
    config, layer = head.config, head.layers[0]
    hidden = config.hidden_size
    last = weights.config["num_hidden_layers"] - 1

    def source(index: int, name: str) -> torch.Tensor:
        return weights.get(f"model.layers.{index}.{name}").float()

    def copy(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        parameter.copy_(tensor[tuple(slice(0, size) for size in parameter.shape)])

    for name in ("q_proj", "k_proj", "v_proj"):
        parameter = getattr(layer.self_attn, name).weight
        copy(parameter[:, :hidden], source(0, f"self_attn.{name}.weight") * 0.5)
        copy(parameter[:, hidden:], source(last, f"self_attn.{name}.weight"))
    copy(layer.self_attn.o_proj.weight, source(last, "self_attn.o_proj.weight"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        copy(getattr(layer.mlp, name).weight, source(last, f"mlp.{name}.weight"))
    copy(layer.input_layernorm.weight, source(0, "input_layernorm.weight"))
    copy(layer.hidden_norm.weight, source(last, "input_layernorm.weight"))
    copy(layer.post_attention_layernorm.weight, source(last, "post_attention_layernorm.weight"))
    head.norm.weight.copy_(tables.final_norm)
    noise = torch.randn(head.fc.weight.shape, generator=generator) * 0.1 * hidden**-0.5
    head.fc.weight.copy_(noise)
    size = config.target_hidden_size
    for index, scale in enumerate(layer_scales):
        columns = slice(index * size, (index + 1) * size)
        # The residual stream keeps the deepest state's own scale, which the other parts expect.
        head.fc.weight[:, columns] *= layer_scales[-1] / scale
    if size == hidden:
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
