# SPDX-License-Identifier: Apache-2.0
"""Folders of features: whole shards, and how sequences are batched."""

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


def test_the_space_of_a_shard_is_reserved_before_the_target_runs(tmp_path):
    """A write to a memory map of a full disk would end the process."""
    sequences = [TokenSequence(torch.arange(3, 20), 5, "a")] * 4

    meta = {"aux_size": 4096, "hidden_size": 2048}

    def stop(_rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_features(tmp_path / "s", sequences, stop, meta=meta)
    for name, width in (("aux.bf16", 4096), ("hidden.bf16", 2048)):
        found = (tmp_path / "s.partial" / name).stat()
        assert found.st_size == 4 * 17 * width * 2 <= 512 * found.st_blocks


def test_empty_folder_names_the_command(tmp_path):
    with pytest.raises(ValueError, match="specplug data features"):
        FeatureStore(tmp_path)


@pytest.mark.parametrize("name", ["meta.json", "aux.bf16", "tokens.npy"])
def test_a_shard_that_was_cut_off_is_named(tmp_path, target_model, name):
    path = tmp_path / "shard-0"
    write_shard(path, [TokenSequence(torch.arange(3, 20), 5, "a")], target_model, (1,))
    assert len(FeatureStore(tmp_path)) == 1
    (path / name).write_bytes((path / name).read_bytes()[:10])
    with pytest.raises(ValueError, match=f"feature shard {path} is damaged .*; remove it and"):
        FeatureStore(tmp_path)


def test_length_batches_cover_everything_within_the_limit():
    lengths = [5, 90, 7, 100, 3, 41, 250]
    batches = list(length_batches(lengths, 120))
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 120
