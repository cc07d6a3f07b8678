# SPDX-License-Identifier: Apache-2.0
"""Cached features are the target's own states, row by row."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.train.features import (
    FeatureStore,
    TokenSequence,
    length_batches,
    write_features,
    write_shard,
)


def test_features_are_the_layers_outputs_and_the_teacher(feature_folders, target_model):
    """Padding and batching leave no trace: each sequence alone gives the same states."""
    store = FeatureStore(feature_folders[0])
    assert store.target_layer_ids == (0, 2)
    assert len(store) == 12
    for index in (0, 5, 11):
        sequence = store[index]
        last: list[torch.Tensor] = []
        handle = target_model.model.norm.register_forward_pre_hook(
            lambda _m, args, last=last: last.append(args[0])
        )
        with torch.no_grad():
            out = target_model(sequence.tokens[None], output_hidden_states=True)
        handle.remove()
        logits = out.logits[0]
        # hidden_states[0] is the embedding; the output of layer 2 is what the final norm reads.
        want = torch.cat([out.hidden_states[1], last[0]], -1)[0]
        torch.testing.assert_close(sequence.aux, want, rtol=0.05, atol=0.05)
        # The row before an answer token predicts it: the answers are greedy.
        teacher = sequence.hidden.float() @ target_model.lm_head.weight.float().t()
        torch.testing.assert_close(teacher, logits.float(), rtol=0.1, atol=0.3)
        start = sequence.prompt_len
        predicted = teacher[start - 1 : -1].argmax(-1)
        assert (predicted == sequence.tokens[start:]).float().mean() > 0.9


def test_an_interrupted_shard_is_not_seen(tmp_path, target_model):

    sequences = [TokenSequence(torch.arange(3, 20), 5, "a")] * 4
    write_shard(tmp_path / "shard-00000", sequences, target_model, (1,))

    def stop(_rows):
        raise KeyboardInterrupt

    meta = {"aux_size": 8, "hidden_size": 8}
    with pytest.raises(KeyboardInterrupt):
        write_features(tmp_path / "shard-00001", sequences, stop, meta=meta)
    assert len(FeatureStore(tmp_path)) == 4
    write_shard(tmp_path / "shard-00001", sequences, target_model, (1,))
    assert len(FeatureStore(tmp_path)) == 8


def test_empty_folder_names_the_command(tmp_path):
    with pytest.raises(ValueError, match="specplug data features"):
        FeatureStore(tmp_path)


def test_length_batches_cover_everything_within_the_limit():
    lengths = [5, 90, 7, 100, 3, 41, 250]
    batches = list(length_batches(lengths, 120))
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 120
