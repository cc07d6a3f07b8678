# SPDX-License-Identifier: Apache-2.0
"""Reading heads of both published formats, and what bad ones get."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.methods.block.published import TINY_TARGET, ZLAB_QWEN3_8B, tiny
from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.block.config import BlockHeadConfig, default_target_layer_ids
from vllm_specplug.methods.block.head import BlockHead

TARGET = {**TINY_TARGET, "num_hidden_layers": 6}


def zlab_config(**changes) -> dict:
    """Without the fields that a head need not have."""
    config = tiny(ZLAB_QWEN3_8B)
    for name in ("num_target_layers", "sliding_window", "use_sliding_window"):
        del config[name]
    return {**config, **changes}


def write(folder, config: dict, tensors: dict, name: str = "model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder


@pytest.fixture
def tensors() -> dict:
    torch.manual_seed(0)
    head = BlockHead(BlockHeadConfig.from_dict(zlab_config()))
    return {k: torch.randn_like(v) for k, v in head.state_dict().items() if k != "mask_embedding"}


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({"dflash_config": {"mask_token_id": 1, "causal_head": True}}, True),
        ({"dflash_config": {"mask_token_id": 1, "causal": True}}, True),
        ({"dflash_config": {"mask_token_id": 1, "is_causal": True}}, True),
        ({"is_causal": True}, True),
        ({"is_causal": False, "dflash_config": {"causal_head": True}}, False),
        ({"dflash_config": None, "jetspec_config": {"mask_token_id": 1}}, True),
        ({"dflash_config": None, "jetspec_config": {"causal_head": False}}, False),
        ({}, False),
    ],
)
def test_causality_is_read_from_every_container(changes, causal):
    read = BlockHeadConfig.from_dict(zlab_config(**changes), num_target_layers=6)
    assert read.causal is causal


def test_fields_may_stand_elsewhere_or_be_absent():
    nested = zlab_config(dflash_config={"block_size": 7, "target_layer_ids": [1]})
    del nested["block_size"]
    assert BlockHeadConfig.from_dict(nested).block_size == 7
    config = zlab_config(dflash_config=None, eagle_aux_hidden_state_layer_ids=[2, 5], pard_token=3)
    read = BlockHeadConfig.from_dict(config, num_target_layers=6)
    assert (read.target_layer_ids, read.mask_token_id) == ((1, 4), 3)
    # Absent layers follow the published rule.
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(30, 1) == (15,)
    read = BlockHeadConfig.from_dict(zlab_config(dflash_config={}), num_target_layers=36)
    assert read.target_layer_ids == (1, 33)


def test_prefixed_names_and_an_index_of_shards(tmp_path, tensors):
    folder = tmp_path / "h"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(zlab_config()))
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    weight_map = {}
    for file, members in parts.items():
        save_file({f"model.{n}": tensors[n] for n in members}, folder / file)
        weight_map.update({f"model.{n}": file for n in members})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    head, _ = load_block_head(folder, TARGET)
    assert all(torch.equal(head.state_dict()[n], t) for n, t in tensors.items())
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors"):
        load_block_head(folder, TARGET)


@pytest.mark.parametrize(
    ("changes", "target", "words"),
    [
        ({}, {"num_hidden_layers": 3}, ["target_layer_ids = [1, 3]", "[3]", "0..2"]),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, {}, ["mask_token_id = None", "0..29"]),
        (
            {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 30}},
            {},
            ["mask_token_id = 30", "0..29"],
        ),
        ({"draft_vocab_size": 20}, {}, ["d2t", "draft_vocab_size = 20"]),
    ],
)
def test_head_of_another_target_names_field_and_legal_values(
    tmp_path, tensors, changes, target, words
):
    folder = write(tmp_path / "h", zlab_config(**changes), tensors)
    with pytest.raises(ValueError) as error:
        load_block_head(folder, {**TARGET, **target})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("missing", ["folder", "config.json", "model.safetensors"])
def test_missing_files_are_named(tmp_path, tensors, missing):
    folder = write(tmp_path / "h", zlab_config(), tensors)
    if missing == "folder":
        folder = tmp_path / "nowhere"
    else:
        (folder / missing).unlink()
    with pytest.raises(ValueError, match=missing.replace(".", r"\.")):
        load_block_head(folder, TARGET)


def test_draft_map_must_be_distinct_target_ids(tmp_path, tensors):
    for d2t in (torch.arange(20) + 40, torch.zeros(20).long() - torch.arange(20)):
        folder = write(tmp_path / "h", zlab_config(draft_vocab_size=20), {**tensors, "d2t": d2t})
        with pytest.raises(ValueError, match="d2t"):
            load_block_head(folder, TARGET)


def test_mask_embedding_tensor_wins_over_the_token_row(tmp_path, tensors):
    own = torch.full((16,), 3.0)
    config = zlab_config(dflash_config={"target_layer_ids": [1, 3]})
    folder = write(tmp_path / "h", config, {**tensors, "mask_embedding": own})
    head, extras = load_block_head(folder, TARGET)
    assert torch.equal(head.mask_embedding, own)
    assert not extras.mask_from_embedding
    assert "mask_embedding" in load_file(folder / "model.safetensors")
