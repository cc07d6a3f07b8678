# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are untrusted input: whatever they hold, a ValueError and no memory."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.unit.methods import absurd
from tests.unit.methods.absurd import ABSURD, taken_or_refused
from tests.unit.methods.assistant_tree import published as assistant
from tests.unit.methods.eagle3_tree.heads import write_head as write_eagle3_head
from tests.unit.methods.eagle3_tree.published import SMALL
from vllm_specplug.drafting.checkpoint_files import MAX_JSON_BYTES
from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.methods.block.checkpoint import (
    inspect_block_head,
    load_block_head,
    save_block_head,
)
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.registry import methods

TARGET = {"hidden_size": 16, "vocab_size": 20, "num_hidden_layers": 4}
CONFIG = BlockHeadConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, vocab_size=20, draft_vocab_size=20, target_hidden_size=16,
    target_layer_ids=(1, 2), block_size=4, mask_token_id=3,
)  # fmt: skip


@pytest.fixture
def head(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_block_head(tmp_path / "head", BlockHead(CONFIG), dtype=torch.float32)
    return tmp_path / "head"


def refused(folder: Path, *words: str) -> None:
    absurd.refused(lambda: load_block_head(folder, TARGET), *words)


def test_the_untouched_head_loads(head: Path) -> None:
    load_block_head(head, TARGET)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "..", "sub/x.safetensors", "x.bin", "",
     "x\0.safetensors", "..\\x.safetensors/../y.safetensors"],
)  # fmt: skip
def test_an_index_cannot_leave_its_folder(head: Path, name: str) -> None:
    (head / "model.safetensors").rename(head.parent / "secret.safetensors")
    index = {"weight_map": {"norm.weight": name}}
    (head / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(head, "names of *.safetensors files in the same folder")


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}'])
def test_an_index_that_is_none(head: Path, index: str) -> None:
    (head / "model.safetensors").unlink()
    (head / "model.safetensors.index.json").write_text(index)
    refused(head, "model.safetensors.index.json")


def test_pickles_are_never_opened(head: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    (head / "model.safetensors").unlink()
    (head / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(head, "pickled weights", "pytorch_model.bin")
    # The same bytes under a name that promises safety.
    (head / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    refused(head, "model.safetensors")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("claimed", [0, 1, 1 << 30, (1 << 27) + 1, (1 << 64) - 1])
def test_headers_that_claim_too_much_or_nothing(head: Path, claimed: int) -> None:
    (head / "model.safetensors").write_bytes(struct.pack("<Q", claimed) + b"{}" * 8)
    refused(head, "model.safetensors")


def test_shapes_beyond_the_file(head: Path) -> None:
    tensor = {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 8]}
    header = json.dumps({"norm.weight": tensor}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(8)
    (head / "model.safetensors").write_bytes(data)
    refused(head, "model.safetensors")


def test_a_huge_tensor_that_does_not_fit_is_not_read(head: Path) -> None:
    """A sparse file of 4 GiB: reading it would be noticed."""
    size = 4 << 30
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"norm.weight": tensor}).encode()
    with (head / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + size)
    refused(head, "misshapen norm.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(head: Path, value: float) -> None:
    weights = load_file(head / "model.safetensors")
    weights["fc.weight"][3, 2] = value
    save_file(weights, head / "model.safetensors")
    refused(head, "fc.weight", "1 values that are not finite")


def test_large_finite_values_are_not_taken_for_infinite(head: Path) -> None:
    weights = load_file(head / "model.safetensors")
    weights["fc.weight"][:] = 3e38
    save_file(weights, head / "model.safetensors")
    load_block_head(head, TARGET)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]
)
def test_dtypes_that_are_no_weights(head: Path, dtype: torch.dtype) -> None:
    weights = load_file(head / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"].to(dtype)
    save_file(weights, head / "model.safetensors")
    refused(head, "fc.weight", "dtype", "legal: BF16, F16, F32")
    with pytest.raises(ValueError, match="dtype"):
        inspect_block_head(head, TARGET)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 100_000, "not JSON"),
        (b'"hello"', "JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b"{}", "hidden_size"),
        (b"nul", "not JSON"),
    ],
)
def test_configs_that_are_none(head: Path, text: bytes, words: str) -> None:
    (head / "config.json").write_bytes(text)
    refused(head, words)


def test_a_config_of_gigabytes(head: Path) -> None:
    with (head / "config.json").open("wb") as stream:
        stream.truncate(MAX_JSON_BYTES + 1)
    refused(head, "at most")


def test_damaged_files_are_taken_or_refused(head: Path) -> None:
    original = (head / "model.safetensors").read_bytes()

    @settings(max_examples=60)
    @given(
        position=st.floats(0, 1), flipped=st.binary(min_size=1, max_size=24), cut=st.floats(0, 1)
    )
    def check(position: float, flipped: bytes, cut: float) -> None:
        at = int(position * min(len(original), 2000))
        damaged = original[:at] + flipped + original[at + len(flipped) :]
        if cut < 0.5:
            damaged = damaged[: int(2 * cut * len(damaged))]
        (head / "model.safetensors").write_bytes(damaged)
        taken_or_refused(lambda: load_block_head(head, TARGET))

    check()


def test_a_tensor_under_two_names_is_refused(head: Path) -> None:
    weights = load_file(head / "model.safetensors")
    weights["model.norm.weight"] = weights["norm.weight"] + 1
    save_file(weights, head / "model.safetensors")
    refused(head, "norm.weight", "twice")


def test_a_tensor_in_two_shards_is_refused(head: Path) -> None:
    weights = load_file(head / "model.safetensors")
    (head / "model.safetensors").rename(head / "a.safetensors")
    save_file({"norm.weight": weights["norm.weight"] + 1}, head / "b.safetensors")
    names = {"weight_map": {"fc.weight": "a.safetensors", "norm.weight": "b.safetensors"}}
    (head / "model.safetensors.index.json").write_text(json.dumps(names))
    refused(head, "norm.weight", "twice")


def test_a_key_given_twice_is_refused(head: Path) -> None:
    text = (head / "config.json").read_text()
    (head / "config.json").write_text(text.rstrip().removesuffix("}") + ', "hidden_size": 16}')
    refused(head, "config.json", "hidden_size", "twice")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_has_not(head: Path, value: str) -> None:
    config = json.loads((head / "config.json").read_text())
    config["rope_theta"] = 12345.5
    text = json.dumps(config).replace("12345.5", value)
    (head / "config.json").write_text(text)
    refused(head)


def test_folders_and_pipes_in_place_of_weights(head: Path) -> None:
    (head / "model.safetensors").unlink()
    (head / "weights.safetensors").mkdir()
    refused(head, "no *.safetensors file")
    (head / "weights.safetensors").rmdir()
    # Opened, a pipe would wait for ever.
    os.mkfifo(head / "weights.safetensors")
    refused(head, "no *.safetensors file")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_layer_ids", "12"),
        ("target_layer_ids", [1.5, 2]),
        ("target_layer_ids", [True, 2]),
        ("target_layer_ids", {"1": 2}),
        ("block_size", 4.5),
        ("block_size", True),
        ("block_size", "4"),
    ],
)
def test_numbers_are_taken_as_they_stand(head: Path, name: str, value: Any) -> None:
    config = json.loads((head / "config.json").read_text())
    container = config["dflash_config"] if name in config["dflash_config"] else config
    container[name] = value
    (head / "config.json").write_text(json.dumps(config))
    refused(head, name)


def _longspec(folder: Path) -> tuple[dict[str, Any], Any]:
    from vllm_specplug.methods.longspec.checkpoint import inspect_longspec_head, save_longspec_head
    from vllm_specplug.methods.longspec.config import LongSpecConfig
    from vllm_specplug.methods.longspec.head import LongSpecHead

    target = {**TARGET, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8,
              "num_key_value_heads": 1, "rope_theta": 1e4}  # fmt: skip
    save_longspec_head(folder, LongSpecHead(LongSpecConfig.for_target(target)))
    return target, inspect_longspec_head


def _tokenswift(folder: Path) -> tuple[dict[str, Any], Any]:
    from vllm_specplug.methods.tokenswift.head import (
        TokenSwiftConfig,
        TokenSwiftHeads,
        inspect_heads,
        save_heads,
    )

    save_heads(folder, TokenSwiftHeads(TokenSwiftConfig(16, 20, 20)))
    return TARGET, inspect_heads


def _local(folder: Path) -> tuple[dict[str, Any], Any]:
    from vllm_specplug.methods.dels.checkpoint import inspect_local_head, save_local_head
    from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig

    save_local_head(folder, LocalHead(LocalHeadConfig("gru", 20, 16, 4, 6)))
    return TARGET, inspect_local_head


def _dspark(folder: Path) -> tuple[dict[str, Any], Any]:
    from vllm_specplug.methods.dspark_tree.checkpoint import save_dspark_head
    from vllm_specplug.methods.dspark_tree.config import DSparkConfig

    w1, w2 = torch.zeros(2, 20, 4)
    save_dspark_head(folder, BlockHead(CONFIG), w1, w2, dtype=torch.float32)
    return TARGET, partial(inspect_block_head, kind=DSparkConfig)


def _dflash2(folder: Path) -> tuple[dict[str, Any], Any]:
    from tests.e2e.tiny import HIDDEN, make_dflash2_head
    from vllm_specplug.methods.dflash2_tree.config import DFlash2Config

    make_dflash2_head(folder, 20)
    target = {"hidden_size": HIDDEN, "vocab_size": 20, "num_hidden_layers": 2}
    return target, partial(inspect_block_head, kind=DFlash2Config)


def _scaled(folder: Path) -> tuple[dict[str, Any], Any]:
    """A block head with everything that its layers may have."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = replace(
        CONFIG, windows=(8,), rope_scaling=scaling, partial_rotary_factor=0.5,
        sample_from_anchor=True, max_position_embeddings=64,
    )  # fmt: skip
    save_block_head(folder, BlockHead(config), dtype=torch.float32)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "use_sliding_window": True}))
    return TARGET, load_block_head


def _eagle3(folder: Path) -> tuple[dict[str, Any], Any]:
    from vllm_specplug.methods.eagle3_tree.checkpoint import inspect_eagle3_head

    raw, _ = write_eagle3_head(folder, "specforge", eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    absent = ("transformer_layer_config", "target_hidden_size", "rope_parameters", "eagle_config")
    (folder / "config.json").write_text(json.dumps({**raw, **dict.fromkeys(absent)}))
    return SMALL, inspect_eagle3_head


def _assistant(folder: Path) -> tuple[dict[str, Any], Any]:
    from vllm_specplug.methods.assistant_tree.checkpoint import inspect_assistant

    raw = assistant.small(assistant.GEMMA4_E2B)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(assistant.tensors_of(raw), folder / "model.safetensors")
    return assistant.target_of(raw), inspect_assistant


def places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every field of a config and of the objects in it."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return [(part, name) for part in parts for name in sorted(part)]


READERS = pytest.mark.parametrize(
    "make", [_longspec, _tokenswift, _local, _dspark, _dflash2, _scaled, _eagle3, _assistant]
)


@READERS
@pytest.mark.parametrize("examples", [50, pytest.param(250, marks=pytest.mark.full)])
def test_any_value_in_any_field_is_taken_or_refused(
    make: Any, examples: int, tmp_path: Path
) -> None:
    target, read = make(tmp_path)
    read(tmp_path, target)
    sound = json.loads((tmp_path / "config.json").read_text())

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        config = copy.deepcopy(sound)
        fields = st.sampled_from(places(config))
        for part, name in data.draw(st.lists(fields, min_size=1, max_size=2)):
            part[name] = data.draw(ABSURD)
        (tmp_path / "config.json").write_text(json.dumps(config))
        for method in methods().values():
            method.recognises_head(HeadFiles(tmp_path, config))
        taken_or_refused(lambda: read(tmp_path, target))

    check()


@READERS
def test_tensors_that_do_not_fit_the_config_are_named(make: Any, tmp_path: Path) -> None:
    target, read = make(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    floats = [name for name, tensor in sorted(tensors.items()) if tensor.is_floating_point()]
    gone, other = floats[-1], floats[-2]
    del tensors[gone]
    tensors[other] = torch.zeros(3, 5, 7)
    save_file(tensors, file)
    # Names may have another prefix inside.
    missing, misshapen = gone.removeprefix("model."), other.partition(".")[2] or other
    with pytest.raises(ValueError, match=rf"missing {missing} .*misshapen \S*{misshapen}: config"):
        read(tmp_path, target)


@READERS
@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_a_head_of_another_target_is_refused(make: Any, field: str, tmp_path: Path) -> None:
    target, read = make(tmp_path)
    other = target[field] + 8
    with pytest.raises(ValueError, match=rf"{field} = {target[field]}, legal: {other}"):
        read(tmp_path, {**target, field: other})


@pytest.mark.parametrize("make", [_longspec, _tokenswift])
@pytest.mark.parametrize("eps", [0, -1.0, True, "1e-6", [1e-6], 1e400])
def test_a_norm_needs_a_positive_epsilon(tmp_path: Path, make: Any, eps: Any) -> None:
    target, inspect = make(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = json.dumps({**config, "rms_norm_eps": eps}).replace("Infinity", "1e400")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="rms_norm_eps"):
        inspect(tmp_path, target)
