# SPDX-License-Identifier: Apache-2.0
"""Training of TokenSwift heads on a tiny target's features."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm_specplug.methods.tokenswift.head import TokenSwiftConfig, TokenSwiftHeads, load_heads
from vllm_specplug.methods.tokenswift.train.run import TokenSwiftRun, train_tokenswift
from vllm_specplug.methods.tokenswift.train.trainer import (
    TokenSwiftRecipe,
    TokenSwiftTrainer,
    evaluate_heads,
    heads_loss,
    last_layer_columns,
    new_heads,
    training_rows,
)
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.loop import LoopOptions
from vllm_specplug.train.target import TargetWeights

VOCAB, HIDDEN, LAYERS = 64, 32, 3


def _trainer(folder, **options) -> TokenSwiftTrainer:
    torch.manual_seed(0)
    store = FeatureStore(folder)
    recipe = TokenSwiftRecipe(
        tokens_per_step=40, learning_rate=0.2, adam_learning_rate=0.03, warmup_steps=0, **options
    )
    return TokenSwiftTrainer(
        new_heads(TokenSwiftConfig(HIDDEN, VOCAB, VOCAB), torch.ones(HIDDEN)),
        store,
        last_layer_columns(store, LAYERS, HIDDEN),
        recipe,
        lm_head=torch.randn(VOCAB, HIDDEN).bfloat16(),
        draft_of=torch.arange(VOCAB),
    )


def test_heads_are_held_to_the_tokens_two_and_more_places_on(feature_folders) -> None:
    trainer = _trainer(feature_folders[0])
    hidden, targets, teachers = trainer.batch()
    order = type(trainer.order)(trainer.store, 0)
    start = 0
    while start < len(hidden):
        sequence = trainer.store[next(order)]
        first, end = training_rows(sequence, 3)
        rows = slice(start, start + end - first)
        assert torch.equal(hidden[rows], sequence.aux[first:end, trainer.columns])
        for head in range(3):
            offset = head + 2
            assert torch.equal(targets[head, rows], sequence.tokens[first + offset : end + offset])
            # The state that predicts that token lies one place before it.
            state = sequence.hidden[first + offset - 1 : end + offset - 1]
            assert torch.equal(teachers[head, rows], state)
        assert first + 2 >= sequence.prompt_len  # answers only
        start += end - first
    assert start == len(hidden)


def test_new_heads_repeat_the_base_prediction() -> None:
    heads = new_heads(TokenSwiftConfig(HIDDEN, VOCAB, VOCAB), torch.arange(HIDDEN).float())
    hidden = torch.randn(4, HIDDEN)
    outputs = heads(hidden)
    assert torch.equal(outputs[0], outputs[2])
    expected = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * torch.arange(HIDDEN)
    torch.testing.assert_close(outputs[0], expected)


def test_the_sft_loss_is_the_sum_of_cross_entropies() -> None:
    torch.manual_seed(0)
    heads = TokenSwiftHeads(TokenSwiftConfig(HIDDEN, VOCAB, VOCAB))
    lm_head, hidden = torch.randn(VOCAB, HIDDEN), torch.randn(5, HIDDEN)
    targets = torch.randint(0, VOCAB, (3, 5))
    loss = heads_loss(heads, lm_head, hidden, targets, torch.zeros(3, 5, HIDDEN), "sft")
    expected = sum(
        torch.nn.functional.cross_entropy(output @ lm_head.t(), target)
        for output, target in zip(heads(hidden), targets, strict=True)
    )
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("loss", ["forward_kl", "sft"])
def test_training_lowers_the_loss_and_resumes_exactly(feature_folders, tmp_path, loss) -> None:
    trainer = _trainer(feature_folders[0], loss=loss)
    losses = [trainer.train_step()["loss"] for _ in range(60)]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    trainer.save(tmp_path)
    resumed = _trainer(feature_folders[0], loss=loss)
    resumed.resume(tmp_path)
    assert trainer.train_step()["loss"] == resumed.train_step()["loss"]


def test_a_run_exports_heads_that_load(target_folder, feature_folders, tmp_path) -> None:
    train, held = feature_folders
    run = TokenSwiftRun(str(target_folder), str(train), str(held), draft_vocab_size=40)
    recipe = TokenSwiftRecipe(tokens_per_step=40, learning_rate=0.05, total_steps=25)
    logs: list[str] = []
    facts = train_tokenswift(run, recipe, LoopOptions(str(tmp_path)), logs.append)
    heads, target_ids = load_heads(
        tmp_path / "head", json.loads((target_folder / "config.json").read_text())
    )
    assert len(target_ids) == 40
    assert set(facts["heldout"]["mean_acceptance_length"]) == {
        "heads/8", "heads/16", "self/8", "self/16",
    }  # fmt: skip
    assert (tmp_path / "head" / "provenance.json").is_file()
    # The base prediction of a greedy answer is right as far as bfloat16 allows.
    store, tables = FeatureStore(held), TargetWeights(target_folder).tables()
    lengths = evaluate_heads(
        heads.float(),
        [store[0]],
        last_layer_columns(store, LAYERS, HIDDEN),
        tables,
        tables.lm_head,
        torch.arange(VOCAB),
    )
    assert lengths["self/16"] > lengths["heads/16"]
    assert lengths["self/16"] > 1.7
    with pytest.raises(ValueError, match="exists; pass --resume"):
        train_tokenswift(run, recipe, LoopOptions(str(tmp_path)))


def test_a_resumed_run_keeps_its_draft_vocabulary_when_the_data_has_grown(
    target_folder, feature_folders, tmp_path
) -> None:
    features, held = tmp_path / "features", feature_folders[1]
    shutil.copytree(feature_folders[0], features)
    run = TokenSwiftRun(str(target_folder), str(features), str(held), draft_vocab_size=12)
    recipe = TokenSwiftRecipe(tokens_per_step=40, total_steps=1)

    def vocabulary(folder: str, steps: int, resume: bool = False) -> list[int]:
        loop = LoopOptions(str(tmp_path / folder), resume=resume)
        train_tokenswift(run, replace(recipe, total_steps=steps), loop, lambda _: None)
        config = json.loads((target_folder / "config.json").read_text())
        return load_heads(tmp_path / folder / "head", config)[1].tolist()

    first = vocabulary("a", 1)
    for number in range(2, 8):
        shutil.copytree(held / "shard-00000", features / f"shard-{number:05d}")
    assert vocabulary("b", 1) != first
    assert vocabulary("a", 2, resume=True) == first


def test_features_without_the_last_layer_are_refused(feature_folders) -> None:
    store = FeatureStore(feature_folders[0])
    with pytest.raises(ValueError, match=r"include the last one, 4, "):
        last_layer_columns(store, 5, HIDDEN)
