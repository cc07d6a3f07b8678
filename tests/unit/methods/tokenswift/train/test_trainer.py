# SPDX-License-Identifier: Apache-2.0
"""What TokenSwift heads are held to, on a tiny target's features."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.methods.tokenswift.head import TokenSwiftConfig
from vllm_specplug.methods.tokenswift.train.objective import (
    TokenSwiftObjective,
    last_layer_columns,
    new_heads,
    training_rows,
)
from vllm_specplug.methods.tokenswift.train.options import TokenSwiftRecipe
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.vocabulary import DraftTables

VOCAB, HIDDEN, LAYERS = 64, 32, 3


def test_heads_are_held_to_the_tokens_two_and_more_places_on(make_job) -> None:
    trainer = make_job("tokenswift", draft_vocab_size=VOCAB).trainer()
    store, objective = trainer.store, trainer.objective
    batch = objective.draw(trainer)
    order = type(trainer.order)(store, 0)
    start = 0
    while start < len(batch.hidden):
        sequence = store[next(order)]
        first, end = training_rows(sequence, 3)
        rows = slice(start, start + end - first)
        assert torch.equal(batch.hidden[rows], sequence.aux[first:end, objective.columns])
        for head in range(3):
            at = slice(first + head + 2, end + head + 2)
            assert torch.equal(batch.targets[head, rows], sequence.tokens[at])
            # The state that predicts that token lies one place before it.
            state = sequence.hidden[at.start - 1 : at.stop - 1]
            assert torch.equal(batch.teachers[head, rows], state)
        assert first + 2 >= sequence.prompt_len  # answers only
        start += end - first
    assert start == len(batch.hidden)


def test_new_heads_repeat_the_base_prediction() -> None:
    heads = new_heads(TokenSwiftConfig(HIDDEN, VOCAB, VOCAB), torch.arange(HIDDEN).float())
    hidden = torch.randn(4, HIDDEN)
    outputs = heads(hidden)
    assert torch.equal(outputs[0], outputs[2])
    expected = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * torch.arange(HIDDEN)
    torch.testing.assert_close(outputs[0], expected)


def test_the_loss_is_the_sum_of_the_heads_cross_entropies(make_job) -> None:
    trainer = make_job("tokenswift", draft_vocab_size=VOCAB, loss="sft").trainer()
    batch = trainer.objective.draw(trainer)
    loss = trainer.objective.loss(trainer, batch)
    table = trainer.tables.lm_head
    outputs = trainer.forward(batch.hidden.float()).bfloat16().float()
    expected = sum(
        torch.nn.functional.cross_entropy(output @ table.bfloat16().float().t(), target)
        for output, target in zip(outputs, batch.targets, strict=True)
    )
    torch.testing.assert_close(loss.total, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(loss.reported, expected / 3, rtol=0.02, atol=0.02)


def test_heldout_chains_are_what_the_heads_predict_from_the_last_verified_position(
    feature_folders,
) -> None:
    """New heads repeat the base prediction, which is that of the anchor itself."""
    store, table = FeatureStore(feature_folders[0]), torch.randn(VOCAB, HIDDEN)
    columns = last_layer_columns(store, LAYERS, HIDDEN)
    heads = new_heads(TokenSwiftConfig(HIDDEN, VOCAB, VOCAB), torch.ones(HIDDEN))
    sequence, anchors = store[0], torch.tensor([9, 12])
    tables = DraftTables(table, table, torch.arange(VOCAB))
    objective = TokenSwiftObjective(TokenSwiftRecipe(), columns)
    drafts = objective.drafts(heads, sequence, anchors, tables)
    base = (sequence.aux[[8, 11]][:, columns].float() @ table.t()).argmax(-1)
    assert torch.equal(drafts, base[:, None].expand(2, 3))


def test_features_without_a_row_to_train_on_are_refused(make_job) -> None:
    with pytest.raises(ValueError, match="is longer than 31 tokens"):
        make_job("tokenswift", num_heads=30).train()


def test_features_without_the_last_layer_are_refused(feature_folders) -> None:
    store = FeatureStore(feature_folders[0])
    with pytest.raises(ValueError, match=r"include the last one, 4, "):
        last_layer_columns(store, 5, HIDDEN)
