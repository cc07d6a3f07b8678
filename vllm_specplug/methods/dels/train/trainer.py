# SPDX-License-Identifier: Apache-2.0
"""Training of a local head (DeLS) from text alone.

The head is a language model of short context: it sees a block's tokens from the anchor on and
predicts each next one, so that at the server its scores and the backbone's are a product of
experts. It never sees the backbone. Its output starts at zero, so training starts as a no-op.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn

from vllm_specplug.methods.dels.train.batch import LocalBatch, local_anchors, pack_local
from vllm_specplug.methods.local.head import LocalHead
from vllm_specplug.train.losses import LOSSES, head_loss
from vllm_specplug.train.order import DataOrder, random_subset
from vllm_specplug.train.recipe import Recipe
from vllm_specplug.train.text import TextSequence, TextStore
from vllm_specplug.train.trainer import StepLoss, Trainer


@dataclass(frozen=True)
class LocalOptions(Recipe):
    """Recipe of a local head's run.

    `vocab_per_step` above 0 trains each step on as many vocabulary tokens, half of them the
    most frequent, the others drawn at random: the softmax, and the target's, is taken among them.
    """

    loss: str = "sft"
    temperature: float = 1.0
    position_gamma: float = 7.0
    anchors_per_step: int = 1024
    anchors_per_sample: int = 64
    vocab_per_step: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_of("loss", LOSSES)
        self.require_least(
            anchors_per_step=1, anchors_per_sample=1, position_gamma=0, vocab_per_step=0
        )
        self.require_positive("temperature")


class Scoring(nn.Module):
    """The local head with the target's frozen embeddings."""

    def __init__(self, head: LocalHead, embed_tokens: torch.Tensor):
        super().__init__()
        self.head = head
        self.embed_tokens: torch.Tensor
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[A, L] -> [A * L, H or r]: what the output matrix is multiplied with, the target's LM
        head or the head's own table."""
        ranks = self.head.ranks(tokens, self.embed_tokens)[0]
        if self.head.config.lm_head_mode == "target_lm_head":
            ranks = self.head.rank_to_hidden(ranks)
        return ranks.flatten(0, 1)


class LocalTrainer(Trainer):
    """Trains a local head.

    Args:
        head: initialised head.
        store: of answers; features where the loss distils the target's distribution.
        block_size: anchor included; a Markov head, which remembers one token, uses 2: every
            pair of neighbours once.
        embed_tokens: [V, H]; lm_head: [V', H] rows of the tokens whose scores are trained;
        target_ids: int64 [V'] their ids.
        counts: int64 [V], how often each token is supervised.

    Raises:
        ValueError: for a distilling loss without the target's states, and `vocab_per_step` with
            the cross-entropy, whose answer may not be among the tokens drawn.
    """

    options: LocalOptions

    def __init__(
        self,
        head: LocalHead,
        store: TextStore,
        options: LocalOptions,
        *,
        block_size: int,
        embed_tokens: torch.Tensor,
        lm_head: torch.Tensor,
        target_ids: torch.Tensor,
        counts: torch.Tensor,
        accelerator: Accelerator | None = None,
    ):
        if options.loss != "sft" and not store.has_teacher:
            raise ValueError(
                f"loss = {options.loss!r}, legal with answers alone: sft; give the folder of "
                "features, which hold the target's distribution"
            )
        if options.loss == "sft" and options.vocab_per_step:
            raise ValueError(
                f"vocab_per_step = {options.vocab_per_step}, legal with loss sft: 0, since an "
                "answer's token may not be among those drawn; use forward_kl or leave it out"
            )
        self.embed_tokens = embed_tokens.float()
        scoring = Scoring(head.float(), self.embed_tokens)
        super().__init__(head, scoring, DataOrder(store, options.seed), options, accelerator)
        self.head, self.store = head, store
        self.block_size = 2 if head.config.kind == "markov" else block_size
        self.lm_head = lm_head.to(self.device, torch.bfloat16)
        self.to_draft = torch.full((head.config.vocab_size,), -1, dtype=torch.int64)
        self.to_draft[target_ids] = torch.arange(len(target_ids))
        # Rows of the LM head by falling frequency.
        self.ranked = torch.argsort(counts[target_ids], descending=True, stable=True)

    def step_vocabulary(self) -> torch.Tensor | None:
        """Rows of the LM head that this step trains, int64 [vocab_per_step]; None for all."""
        size = self.options.vocab_per_step
        if not 0 < size < len(self.ranked):
            return None
        frequent = size - size // 2
        generator = self.step_generator().manual_seed(self.options.seed * 104_729 + self.step)
        drawn = torch.randperm(len(self.ranked) - frequent, generator=generator)[: size // 2]
        return torch.cat((self.ranked[:frequent], self.ranked[frequent + drawn]))

    def next_batch(self) -> LocalBatch:
        """The blocks of the next step on this process."""
        options = self.options
        generator = self.step_generator()
        sequences: list[TextSequence] = []
        anchors: list[torch.Tensor] = []
        dense = self.head.config.kind == "markov"
        most = 1 << 30 if dense else options.anchors_per_sample
        wanted, count = options.anchors_per_step, 0
        while count < wanted:
            sequence = self.store[self.next_index()]
            at = local_anchors(sequence, most, generator)
            if not dense:
                at = random_subset(at, wanted - count, generator)
            if len(at):
                sequences.append(sequence)
                anchors.append(at)
                count += len(at)
        return pack_local(sequences, anchors, self.block_size)

    def step_loss(self) -> StepLoss:
        options = self.options
        batch = self.next_batch()
        weights = batch.weights(options.position_gamma).to(self.device)
        labels = self.to_draft[batch.labels].flatten().to(self.device)
        teacher = None if options.loss == "sft" else batch.teacher
        with self.accelerator.autocast():
            outputs = self.forward_module(batch.tokens.to(self.device))
        own = self.head.config.lm_head_mode == "low_rank"
        table = self.head.low_rank_lm_head.weight if own else self.lm_head
        theirs = self.lm_head
        rows = self.step_vocabulary()
        if rows is not None:
            table, theirs = table[rows], theirs[rows]
        loss = head_loss(
            outputs.to(torch.bfloat16),
            teacher if teacher is None else teacher.to(self.device),
            table,
            labels,
            weights,
            options.loss,
            options.temperature,
            compiled=options.compile,
            teacher_lm_head=theirs if own else None,
        )
        return StepLoss(loss, loss, int(batch.valid.sum()), batch.tokens.numel())

    def averaged_head(self) -> LocalHead:
        """A copy of the head with the averaged weights."""
        with torch.device("meta"):
            head = LocalHead(self.head.config)
        head.load_state_dict(self.averaged_weights(), assign=True)
        return head.eval().requires_grad_(False)
