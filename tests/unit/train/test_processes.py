# SPDX-License-Identifier: Apache-2.0
"""What a step reads: each sequence on one process only, and all of an answer equally often."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from tests.unit.methods.block.train.tiny_heads import make_head
from vllm_specplug.methods.block.train.trainer import BlockTrainer, TrainOptions
from vllm_specplug.methods.dels.train.trainer import LocalOptions, LocalTrainer
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig
from vllm_specplug.methods.tokenswift.head import TokenSwiftConfig
from vllm_specplug.methods.tokenswift.train.trainer import (
    TokenSwiftRecipe,
    TokenSwiftTrainer,
    last_layer_columns,
    new_heads,
)
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.order import random_subset
from vllm_specplug.train.text import TextStore
from vllm_specplug.train.trainer import Trainer

VOCAB, HIDDEN, LAYERS = 64, 32, 3


class OneOf(Accelerator):
    """An accelerator that is one process of several, as far as the data are concerned."""

    def __init__(self, rank: int, count: int) -> None:
        super().__init__(mixed_precision="bf16")
        self.rank, self.count = rank, count

    @property
    def num_processes(self) -> int:
        return self.count

    @property
    def process_index(self) -> int:
        return self.rank


class Recording:
    """A store that remembers which sequences were read."""

    def __init__(self, store: Any) -> None:
        self.store, self.read = store, []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.store[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def block_trainer(features: Path, target: Path, accelerator: Accelerator) -> BlockTrainer:
    head, embed = make_head(target)
    return BlockTrainer(
        head.train(), FeatureStore(features), TrainOptions(anchors_per_step=20, anchor_stride=1),
        embed_tokens=embed, draft_lm_head=embed, target_ids=torch.arange(VOCAB),
        accelerator=accelerator,
    )  # fmt: skip


def local_trainer(features: Path, target: Path, accelerator: Accelerator) -> LocalTrainer:
    store = TextStore(features)
    return LocalTrainer(
        LocalHead(LocalHeadConfig("gru", VOCAB, HIDDEN, 8, 12)), store,
        LocalOptions(anchors_per_step=20), block_size=4, embed_tokens=torch.randn(VOCAB, HIDDEN),
        lm_head=torch.randn(VOCAB, HIDDEN), target_ids=torch.arange(VOCAB),
        counts=store.answer_counts(VOCAB), accelerator=accelerator,
    )  # fmt: skip


def tokenswift_trainer(features: Path, target: Path, accelerator: Accelerator) -> TokenSwiftTrainer:
    store = FeatureStore(features)
    return TokenSwiftTrainer(
        new_heads(TokenSwiftConfig(HIDDEN, VOCAB, VOCAB), torch.ones(HIDDEN)), store,
        last_layer_columns(store, LAYERS, HIDDEN), TokenSwiftRecipe(tokens_per_step=30),
        lm_head=torch.randn(VOCAB, HIDDEN).bfloat16(), draft_of=torch.arange(VOCAB),
        accelerator=accelerator,
    )  # fmt: skip


MAKERS = [block_trainer, local_trainer, tokenswift_trainer]


def draw(trainer: Trainer) -> Any:
    return (trainer.batch if isinstance(trainer, TokenSwiftTrainer) else trainer.next_batch)()


@pytest.mark.parametrize("make", MAKERS)
def test_no_sequence_of_an_epoch_is_read_on_two_processes(make, feature_folders, target_folder):
    read = []
    for rank in range(2):
        torch.manual_seed(0)
        trainer = make(feature_folders[0], target_folder, OneOf(rank, 2))
        trainer.store = Recording(trainer.store)
        while True:
            before = len(trainer.store.read)
            draw(trainer)
            trainer.step += 1
            if trainer.order.epoch:
                break
        read.append(Counter(trainer.store.read[:before]))
    assert read[0] and read[1]
    assert not read[0] & read[1]
    assert max((read[0] | read[1]).values()) == 1


def test_fewer_sequences_than_processes_hang_nobody(feature_folders, target_folder):
    for rank in range(3):
        trainer = tokenswift_trainer(feature_folders[0], target_folder, OneOf(rank, 3))
        trainer.order.size = 1
        trainer.order.store = [0]
        assert trainer.next_index() == trainer.next_index() == 0


def test_a_subset_favours_no_place():
    generator = torch.Generator().manual_seed(0)
    values = torch.arange(10, 30)
    seen = Counter()
    for _ in range(400):
        kept = random_subset(values, 5, generator)
        assert len(kept) == 5 and (kept.diff() > 0).all()
        seen.update(kept.tolist())
    # 100 expected of each; the bounds are beyond five standard deviations.
    assert len(seen) == 20 and min(seen.values()) > 55 and max(seen.values()) < 145
    assert torch.equal(random_subset(values, 20, generator), values)


@pytest.mark.parametrize("make", [block_trainer, local_trainer])
def test_the_last_answer_of_a_step_is_not_cut_short(make, feature_folders, target_folder):
    """A step of few anchors takes them from all over an answer, not from its beginning."""
    from dataclasses import replace

    trainer = make(feature_folders[0], target_folder, OneOf(0, 1))
    trainer.options = replace(trainer.options, anchors_per_step=4)
    furthest = 0
    for _ in range(40):
        trainer.store = Recording(FeatureStore(feature_folders[0]))
        batch = trainer.next_batch()
        trainer.step += 1
        answer = trainer.store.store[trainer.store.read[0]]
        if make is block_trainer:
            places = batch.positions.view(-1, 4)[:, 0] - answer.prompt_len
        else:
            starts = answer.tokens.unfold(0, 3, 1)
            row = (starts == batch.tokens[-1]).all(1).nonzero()
            places = row[-1] - answer.prompt_len if len(row) else torch.zeros(1)
        furthest = max(furthest, int(places.max()))
    assert furthest >= 12  # of answers of 24 tokens
