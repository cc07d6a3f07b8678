# SPDX-License-Identifier: Apache-2.0
"""Training TokenSwift's heads: the target stays frozen, its features are read from disk.

The loss is the sum over heads, head i (from 0) against the token i + 2 places after the position
whose last-layer output it reads: its cross entropy as published ("sft"), or the divergence from the
target's own distribution there ("forward_kl"), which says more per position. Only answer tokens are
predicted: they are the target's own choices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from vllm_specplug.methods.block.train.evaluate import Acceptance
from vllm_specplug.methods.tokenswift.head import TokenSwiftConfig, TokenSwiftHeads, rms_norm
from vllm_specplug.train.features import FeatureSequence, FeatureStore
from vllm_specplug.train.losses import head_loss
from vllm_specplug.train.order import DataOrder
from vllm_specplug.train.recipe import Recipe
from vllm_specplug.train.target import TargetTables
from vllm_specplug.train.trainer import StepLoss, Trainer
from vllm_specplug.tree import build_tree

EVAL_WIDTH = 8


@dataclass(frozen=True)
class TokenSwiftRecipe(Recipe):
    """Options of the optimisation and the loss. Published: AdamW at 5e-3, weight decay 0.1."""

    loss: str = "forward_kl"
    tokens_per_step: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_of("loss", ("forward_kl", "sft"))
        self.require_least(tokens_per_step=1)


def last_layer_columns(store: FeatureStore, num_layers: int, hidden_size: int) -> slice:
    """Which columns of `aux` hold the last decoder layer's output.

    Raises:
        ValueError: when the features were made without that layer.
    """
    ids = store.target_layer_ids
    if num_layers - 1 not in ids:
        raise ValueError(
            f"features hold target layers {list(ids)}, legal: layers that include the last one, "
            f"{num_layers - 1}, whose output the heads read; make them with --layers"
        )
    start = ids.index(num_layers - 1) * hidden_size
    return slice(start, start + hidden_size)


def training_rows(sequence: FeatureSequence, num_heads: int) -> tuple[int, int]:
    """First and end position whose head targets, offsets 2 .. num_heads + 1, are answer tokens."""
    return max(sequence.prompt_len - 2, 0), len(sequence.tokens) - num_heads - 1


def new_heads(config: TokenSwiftConfig, final_norm: torch.Tensor) -> TokenSwiftHeads:
    """Heads that start as copies of the base prediction: zero matrices, the target's final norm."""
    heads = TokenSwiftHeads(config)
    with torch.no_grad():
        for head in heads.medusa_layers:
            head.linear.weight.zero_()
            head.post_layernorm.weight.copy_(final_norm)
    return heads


def heads_loss(
    heads: torch.nn.Module,
    lm_head: torch.Tensor,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    teachers: torch.Tensor,
    loss: str = "sft",
    compiled: bool = False,
) -> torch.Tensor:
    """Sum of the heads' mean losses.

    Args:
        lm_head: [V', H]. hidden: [T, H]. targets: draft ids int64 [num_heads, T], -1 where the
            draft vocabulary lacks the token. teachers: [num_heads, T, H], the target's final
            states, read by "forward_kl" only.
    """
    outputs = heads(hidden.float()).to(lm_head.dtype)
    weights = torch.full((targets.numel(),), 1.0 / targets.shape[1], device=hidden.device)
    return head_loss(
        outputs.flatten(0, 1),
        teachers.flatten(0, 1).to(lm_head.dtype),
        lm_head,
        targets.flatten(),
        weights,
        kind=loss,
        compiled=compiled,
    )


class TokenSwiftTrainer(Trainer):
    """One run.

    Args:
        columns: of the features' `aux` that hold the last layer's output.
        lm_head: frozen draft rows of the target's LM head, bfloat16 [V', H].
        draft_of: int64 [V], the draft id of each target token, -1 where there is none.
    """

    def __init__(
        self,
        heads: TokenSwiftHeads,
        store: FeatureStore,
        columns: slice,
        options: TokenSwiftRecipe,
        *,
        lm_head: torch.Tensor,
        draft_of: torch.Tensor,
        accelerator: Accelerator | None = None,
    ) -> None:
        super().__init__(heads, heads, DataOrder(store, options.seed), options, accelerator)
        self.store, self.columns, self.recipe = store, columns, options
        self.lm_head = lm_head.to(self.device)
        self.draft_of = draft_of
        self.num_heads = heads.config.medusa_heads
        if not any(self._length(i) for i in range(len(store))):
            raise ValueError(
                f"no answer in {str(store.folder)!r} is longer than {self.num_heads + 1} tokens; "
                "make longer ones"
            )

    def _length(self, index: int) -> int:
        """Positions of a sequence that can be trained on."""
        shard, i = self.store.items[index]
        prompt = int(self.store.shards[shard].prompt_lens[i])
        return max(self.store.length(index) - self.num_heads - 1 - max(prompt - 2, 0), 0)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """About `tokens_per_step` positions: hidden [T, H], and of every head its target tokens
        int64 [num_heads, T] and the target's final states that predict them [num_heads, T, H]."""
        hidden: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        teachers: list[torch.Tensor] = []
        count, offsets = 0, range(2, self.num_heads + 2)
        while count < self.recipe.tokens_per_step:
            sequence = self.store[self.next_index()]
            first, end = training_rows(sequence, self.num_heads)
            if end <= first:
                continue
            hidden.append(sequence.aux[first:end, self.columns])
            targets.append(torch.stack([sequence.tokens[first + k : end + k] for k in offsets]))
            teachers.append(
                torch.stack([sequence.hidden[first + k - 1 : end + k - 1] for k in offsets])
            )
            count += end - first
        return torch.cat(hidden), torch.cat(targets, 1), torch.cat(teachers, 1)

    def step_loss(self) -> StepLoss:
        hidden, targets, teachers = self.batch()
        loss = heads_loss(
            self.forward_module,
            self.lm_head,
            hidden.to(self.device),
            self.draft_of[targets].to(self.device),
            teachers.to(self.device),
            self.recipe.loss,
            self.recipe.compile,
        )
        slots = targets.numel()
        return StepLoss(loss, loss.detach() / self.num_heads, slots, slots)


@torch.no_grad()
def evaluate_heads(
    heads: TokenSwiftHeads,
    sequences: Sequence[FeatureSequence],
    columns: slice,
    tables: TargetTables,
    lm_head: torch.Tensor,
    target_ids: torch.Tensor,
    budgets: Sequence[int] = (8, 16),
) -> dict[str, float]:
    """Mean acceptance length on greedy answers, by way of drafting and tree budget.

    "heads" drafts from the last verified position; "self" from the anchor's own position, as after
    a draft forward that agrees with the target, so it is an upper bound of the partial cache.
    """
    totals: dict[str, Acceptance] = defaultdict(Acceptance)
    for sequence in sequences:
        tokens, start = sequence.tokens, max(sequence.prompt_len, 1)
        if len(tokens) - 1 <= start:
            continue
        hidden = sequence.aux[start - 1 :, columns].to(lm_head.device)
        base = rms_norm(
            hidden.float(), tables.final_norm.float().to(hidden.device), heads.config.rms_norm_eps
        )
        outputs = torch.cat((base[None], heads(hidden.float()))).to(lm_head.dtype)
        logits = (outputs @ lm_head.t()).float()
        top = logits.topk(EVAL_WIDTH, dim=-1)
        log_probs = (top.values - logits.logsumexp(-1, keepdim=True)).transpose(0, 1).cpu().numpy()
        ids = target_ids[top.indices.cpu()].transpose(0, 1).numpy()
        for name, first_depth, shift in (("heads", 1, 0), ("self", 0, 1)):
            for budget in budgets:
                total, anchor = totals[f"{name}/{budget}"], start
                while anchor < len(tokens) - 1:
                    row = anchor - start + shift
                    tree = build_tree(
                        "best_first",
                        ids[row, first_depth:],
                        log_probs[row, first_depth:],
                        budget,
                        tree_width=EVAL_WIDTH,
                        tree_depth=ids.shape[1],
                    )
                    parent, accepted = -1, 0
                    for token in tokens[anchor + 1 :].tolist():
                        child = tree.child_of(parent, token)
                        if child is None:
                            break
                        parent, accepted = child, accepted + 1
                    total.rounds += 1
                    total.accepted += accepted
                    anchor += accepted + 1
    return {name: round(total.mean_acceptance_length, 3) for name, total in totals.items()}
