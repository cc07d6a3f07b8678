# SPDX-License-Identifier: Apache-2.0
"""What a step reads: each sequence on one process only, and all of an answer equally often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.unit.train.heads import OneOf
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.order import random_subset


class Recording:
    """A store that remembers which sequences were read."""

    def __init__(self, store: Any) -> None:
        self.store, self.read = store, []

    def text(self, index: int) -> Any:
        self.read.append(index)
        return self.store.text(index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("kind", ["jetspec", "longspec", "gru"])
def test_no_sequence_of_an_epoch_is_read_on_two_processes(kind, make_job):
    read = []
    for rank in range(2):
        trainer = make_job(kind).trainer(OneOf(rank, 2))
        trainer.store = Recording(trainer.store)
        while True:
            before = len(trainer.store.read)
            trainer.objective.draw(trainer)
            trainer.step += 1
            if trainer.order.epoch:
                break
        read.append(Counter(trainer.store.read[:before]))
    assert read[0] and read[1]
    assert not read[0] & read[1]
    assert max((read[0] | read[1]).values()) == 1


def test_fewer_sequences_than_processes_hang_nobody(make_job):
    for rank in range(3):
        trainer = make_job("tokenswift").trainer(OneOf(rank, 3))
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


@pytest.mark.parametrize("kind", ["jetspec", "gru"])
def test_the_last_answer_of_a_step_is_not_cut_short(kind, make_job, feature_folders):
    """A step of few anchors takes them from all over an answer, not from its beginning."""
    trainer = make_job(kind, anchors_per_step=4).trainer()
    furthest = 0
    for _ in range(40):
        trainer.store = Recording(FeatureStore(feature_folders[0]))
        batch = trainer.objective.draw(trainer)
        trainer.step += 1
        answer = trainer.store.store[trainer.store.read[0]]
        if kind == "jetspec":
            places = batch.positions.view(-1, 4)[:, 0] - answer.prompt_len
        else:
            starts = answer.tokens.unfold(0, 3, 1)
            row = (starts == batch.tokens[-1]).all(1).nonzero()
            places = row[-1] - answer.prompt_len if len(row) else torch.zeros(1)
        furthest = max(furthest, int(places.max()))
    assert furthest >= 12  # of answers of 24 tokens
