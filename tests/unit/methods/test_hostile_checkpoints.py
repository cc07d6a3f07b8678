# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are untrusted input: whatever they hold, a ValueError and no memory. What is written
here reads back unchanged."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.e2e.tiny import HIDDEN, make_dflash2_head
from tests.unit.methods import absurd
from tests.unit.methods.absurd import ABSURD, taken_or_refused
from tests.unit.methods.assistant_tree import published as assistant
from tests.unit.methods.dels.local_heads import KINDS
from tests.unit.methods.dels.local_heads import TARGET as LOCAL_TARGET
from tests.unit.methods.dels.local_heads import make as make_local
from tests.unit.methods.eagle3_tree.heads import write_head as write_eagle3_head
from tests.unit.methods.eagle3_tree.published import SMALL
from vllm_specplug.drafting.checkpoint_files import MAX_JSON_BYTES, HeadTables
from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.methods.assistant_tree.checkpoint import inspect_assistant
from vllm_specplug.methods.block.checkpoint import (
    inspect_block_head,
    load_block_head,
    save_block_head,
)
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.dels.checkpoint import (
    inspect_local_head,
    load_local_head,
    save_local_head,
)
from vllm_specplug.methods.dflash2_tree.config import DFlash2Config
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head, save_dspark_head
from vllm_specplug.methods.dspark_tree.config import DSparkConfig
from vllm_specplug.methods.eagle3_tree.checkpoint import (
    inspect_eagle3_head,
    load_eagle3_head,
    save_eagle3_head,
)
from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.methods.longspec.checkpoint import (
    inspect_longspec_head,
    load_longspec_head,
    save_longspec_head,
)
from vllm_specplug.methods.longspec.config import LongSpecConfig
from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.tokenswift.head import (
    TokenSwiftConfig,
    TokenSwiftHeads,
    inspect_heads,
    load_heads,
    save_heads,
)
from vllm_specplug.registry import methods

TARGET = {"hidden_size": 16, "vocab_size": 20, "num_hidden_layers": 4}
LONGSPEC_TARGET = {**TARGET, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8,
                   "num_key_value_heads": 1, "rope_theta": 1e4}  # fmt: skip
CONFIG = BlockHeadConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, vocab_size=20, draft_vocab_size=20, target_hidden_size=16,
    target_layer_ids=(1, 2), block_size=4, mask_token_id=3,
)  # fmt: skip
# A block head with everything that its layers may have.
SCALED = replace(
    CONFIG, windows=(8,), partial_rotary_factor=0.5, sample_from_anchor=True,
    rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    max_position_embeddings=64,
)  # fmt: skip
inspect_dspark = partial(inspect_block_head, kind=DSparkConfig)


class Head:
    """A block head on disk that tests damage."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        save_block_head(folder, BlockHead(CONFIG), dtype=torch.float32)
        self.folder, self.weights = folder, folder / "model.safetensors"
        self.tensors, self.config = load_file(self.weights), folder / "config.json"

    def refused(self, *words: str) -> None:
        absurd.refused(lambda: load_block_head(self.folder, TARGET), *words)

    def shard(self, names: Any) -> None:
        """Writes an index; texts are written as they are."""
        text = names if isinstance(names, str) else json.dumps({"weight_map": names})
        (self.folder / "model.safetensors.index.json").write_text(text)

    def claim(self, tensor: dict[str, Any], size: int) -> None:
        """Writes weights whose header claims a tensor, and `size` bytes of zeros behind it."""
        header = json.dumps({"norm.weight": {"dtype": "F32", **tensor}}).encode()
        with self.weights.open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            stream.truncate(8 + len(header) + size)


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path / "head")


def test_an_index_names_files_of_its_folder(head: Head) -> None:
    head.weights.rename(head.folder.parent / "secret.safetensors")
    for name in ("../secret.safetensors", "/etc/passwd", "..", "sub/x.safetensors", "x.bin", "",
                 "x\0.safetensors", "..\\x.safetensors/../y.safetensors"):  # fmt: skip
        head.shard({"norm.weight": name})
        head.refused("names of *.safetensors files in the same folder")
    for text in ("[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}'):
        head.shard(text)
        head.refused("model.safetensors.index.json")


def test_pickles_are_never_opened(head: Head, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    head.weights.unlink()
    (head.folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    head.refused("pickled weights", "pytorch_model.bin")
    # The same bytes under a name that promises safety.
    head.weights.write_bytes(pickle.dumps(Bomb()))
    head.refused("model.safetensors")
    assert not (tmp_path / "owned").exists()


def test_headers_that_claim_too_much_or_nothing(head: Head) -> None:
    for claimed in (0, 1, 1 << 30, (1 << 27) + 1, (1 << 64) - 1):
        head.weights.write_bytes(struct.pack("<Q", claimed) + b"{}" * 8)
        head.refused("model.safetensors")
    head.claim({"shape": [1 << 40, 1 << 20], "data_offsets": [0, 8]}, 8)
    head.refused("model.safetensors")
    # A sparse file of 4 GiB: reading it would be noticed.
    size = 4 << 30
    head.claim({"shape": [size // 4], "data_offsets": [0, size]}, size)
    head.refused("misshapen norm.weight")


def test_values_are_finite(head: Head) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        head.tensors["fc.weight"][3, 2] = value
        save_file(head.tensors, head.weights)
        head.refused("fc.weight", "1 values that are not finite")
    # Their sum is not.
    head.tensors["fc.weight"][:] = 3e38
    save_file(head.tensors, head.weights)
    load_block_head(head.folder, TARGET)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]
)
def test_dtypes_that_are_no_weights(head: Head, dtype: torch.dtype) -> None:
    save_file({**head.tensors, "fc.weight": head.tensors["fc.weight"].to(dtype)}, head.weights)
    head.refused("fc.weight", "dtype", "legal: BF16, F16, F32")
    with pytest.raises(ValueError, match="dtype"):
        inspect_block_head(head.folder, TARGET)


@pytest.mark.parametrize(
    ("text", "words"),
    [(b"[" * 100_000, "not JSON"), (b'"hello"', "JSON object"), (b"\xff\xfe", "not JSON"),
     (b"{}", "hidden_size"), (b"nul", "not JSON"), (b" " * (MAX_JSON_BYTES + 1), "at most")],
    ids=range(6),
)  # fmt: skip
def test_configs_that_are_none(head: Head, text: bytes, words: str) -> None:
    head.config.write_bytes(text)
    head.refused(words)


def test_damaged_files_are_taken_or_refused(head: Head) -> None:
    original = head.weights.read_bytes()

    @settings(max_examples=60)
    @given(
        position=st.floats(0, 1), flipped=st.binary(min_size=1, max_size=24), cut=st.floats(0, 1)
    )
    def check(position: float, flipped: bytes, cut: float) -> None:
        at = int(position * min(len(original), 2000))
        damaged = original[:at] + flipped + original[at + len(flipped) :]
        if cut < 0.5:
            damaged = damaged[: int(2 * cut * len(damaged))]
        head.weights.write_bytes(damaged)
        taken_or_refused(lambda: load_block_head(head.folder, TARGET))

    check()


def test_what_is_given_twice_is_refused(head: Head) -> None:
    other = head.tensors["norm.weight"] + 1
    save_file({**head.tensors, "model.norm.weight": other}, head.weights)
    head.refused("norm.weight", "twice")
    head.weights.unlink()
    save_file(head.tensors, head.folder / "a.safetensors")
    save_file({"norm.weight": other}, head.folder / "b.safetensors")
    head.shard({"fc.weight": "a.safetensors", "norm.weight": "b.safetensors"})
    head.refused("norm.weight", "twice")
    text = head.config.read_text().rstrip().removesuffix("}")
    head.config.write_text(text + ', "hidden_size": 16}')
    head.refused("config.json", "hidden_size", "twice")


def test_folders_and_pipes_in_place_of_weights(head: Head) -> None:
    head.weights.unlink()
    (head.folder / "weights.safetensors").mkdir()
    head.refused("no *.safetensors file")
    (head.folder / "weights.safetensors").rmdir()
    # Opened, a pipe would wait for ever.
    os.mkfifo(head.folder / "weights.safetensors")
    head.refused("no *.safetensors file")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("target_layer_ids", ids) for ids in ('"12"', "[1.5, 2]", "[true, 2]", '{"1": 2}')),
        *(("block_size", size) for size in ("4.5", "true", '"4"')),
        # Numbers that JSON has not.
        *(("rope_theta", number) for number in ("NaN", "Infinity", "-Infinity", "1e999")),
    ],
)
def test_numbers_are_taken_as_they_stand(head: Head, name: str, text: str) -> None:
    config = json.loads(head.config.read_text())
    container = config["dflash_config"] if name in config["dflash_config"] else config
    container[name] = "HERE"
    head.config.write_text(json.dumps(config).replace('"HERE"', text))
    head.refused("" if name == "rope_theta" else name)


# Writers take a folder and the draft vocabulary, None for all tokens.
Ids = torch.Tensor | None


def _block(config: BlockHeadConfig, folder: Path, ids: Ids) -> BlockHead:
    head = BlockHead(config if ids is None else replace(config, draft_vocab_size=len(ids)))
    save_block_head(folder, head, target_ids=ids, dtype=torch.float32)
    if config is SCALED:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, "use_sliding_window": True}))
    return head


def _dspark(folder: Path, ids: Ids) -> BlockHead:
    count = 20 if ids is None else len(ids)
    head = BlockHead(replace(CONFIG, draft_vocab_size=count))
    tables = torch.zeros(20, 4), torch.zeros(count, 4)
    save_dspark_head(folder, head, *tables, target_ids=ids, dtype=torch.float32)
    return head


def _longspec(folder: Path, ids: Ids) -> LongSpecHead:
    config = LongSpecConfig.for_target(LONGSPEC_TARGET)
    head = LongSpecHead(config if ids is None else replace(config, draft_vocab_size=len(ids)))
    save_longspec_head(folder, head, target_ids=ids, dtype=torch.float32)
    return head


def _tokenswift(folder: Path, ids: Ids) -> TokenSwiftHeads:
    heads = TokenSwiftHeads(TokenSwiftConfig(16, 20, 20 if ids is None else len(ids)))
    save_heads(folder, heads, target_ids=ids, dtype=torch.float32)
    return heads


def _local(kind: str, folder: Path, ids: Ids) -> Any:
    head = make_local(kind, **({} if ids is None else {"draft_vocab_size": len(ids)}))
    save_local_head(folder, head, target_ids=ids, dtype=torch.float32)
    return head


def _eagle3(folder: Path, ids: Ids) -> None:
    raw, _ = write_eagle3_head(folder, "specforge", eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    absent = ("transformer_layer_config", "target_hidden_size", "rope_parameters", "eagle_config")
    (folder / "config.json").write_text(json.dumps({**raw, **dict.fromkeys(absent)}))


def _written_eagle3(folder: Path, ids: Ids) -> Any:
    published = folder.with_name("published")
    _, tensors = write_eagle3_head(published, "specforge_eagle31")
    count = SMALL["vocab_size"] if ids is None else len(ids)
    config = load_eagle3_head(published, SMALL)[0].config
    head = Eagle3Head(replace(config, draft_vocab_size=count))
    lm_head = torch.randn(count, config.hidden_size)
    save_eagle3_head(folder, head, target_ids=ids, lm_head=lm_head, dtype=torch.float32)
    # By the names of the trainers, so that others read it.
    whole = {"d2t", "t2d"} if ids is None else set()
    assert set(load_file(folder / "model.safetensors")) == set(tensors) - whole
    return head


def _assistant(folder: Path, ids: Ids) -> None:
    raw = assistant.small(assistant.GEMMA4_E2B)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(assistant.tensors_of(raw), folder / "model.safetensors")


def _dflash2(folder: Path, ids: Ids) -> None:
    make_dflash2_head(folder, 20)


DFLASH2 = {"hidden_size": HIDDEN, "vocab_size": 20, "num_hidden_layers": 2}
# Target, reader of config and shapes, and writer.
READERS: dict[str, tuple[dict[str, Any], Callable[..., Any], Callable[..., Any]]] = {
    "longspec": (LONGSPEC_TARGET, inspect_longspec_head, _longspec),
    "tokenswift": (TARGET, inspect_heads, _tokenswift),
    "local": (LOCAL_TARGET, inspect_local_head, partial(_local, "gru_factorized")),
    "dspark": (TARGET, inspect_dspark, _dspark),
    "dflash2": (DFLASH2, partial(inspect_block_head, kind=DFlash2Config), _dflash2),
    "scaled": (TARGET, load_block_head, partial(_block, SCALED)),
    "eagle3": (SMALL, inspect_eagle3_head, _eagle3),
    "assistant": (assistant.target_of(assistant.small(assistant.GEMMA4_E2B)), inspect_assistant,
                  _assistant),
}  # fmt: skip
# Target, reader of config and shapes, loader, and writer.
WRITERS: dict[str, tuple[dict[str, Any], Any, Any, Any]] = {
    "block": (TARGET, inspect_block_head, load_block_head, partial(_block, CONFIG)),
    "dspark": (*READERS["dspark"][:2], load_dspark_head, _dspark),
    "longspec": (*READERS["longspec"][:2], load_longspec_head, _longspec),
    "tokenswift": (*READERS["tokenswift"][:2], load_heads, _tokenswift),
    "eagle3": (SMALL, inspect_eagle3_head, load_eagle3_head, _written_eagle3),
    **{
        kind: (LOCAL_TARGET, inspect_local_head, load_local_head, partial(_local, kind))
        for kind in KINDS
    },
}


@pytest.mark.parametrize(
    ("name", "reduced"),
    # The target's own LM head scores all tokens.
    [(name, r) for name in WRITERS for r in (False, True) if not (r and "target_head" in name)],
)
def test_what_is_written_reads_back_unchanged(name: str, reduced: bool, tmp_path: Path) -> None:
    target, inspect, load, write = WRITERS[name]
    ids = torch.tensor([0, 3, 11, 19]) if reduced else None
    folder = tmp_path / "head"
    head = write(folder, ids)
    again, tables, *_ = load(folder, target)
    config = inspect(folder, target)
    assert again.config == config and config.draft_vocab_size == head.config.draft_vocab_size
    assert name in ("block", "dspark") or config == head.config
    found = tables.target_ids if isinstance(tables, HeadTables) else tables
    assert (found is None) == (ids is None)
    assert ids is None or torch.equal(found, ids)
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors"}


def places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every field of a config and of the objects in it."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return [(part, name) for part in parts for name in sorted(part)]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("examples", [50, pytest.param(250, marks=pytest.mark.full)])
def test_any_value_in_any_field_is_taken_or_refused(
    name: str, examples: int, tmp_path: Path
) -> None:
    target, read, write = READERS[name]
    write(tmp_path, None)
    read(tmp_path, target)
    sound = json.loads((tmp_path / "config.json").read_text())

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        config = copy.deepcopy(sound)
        fields = st.sampled_from(places(config))
        for part, field in data.draw(st.lists(fields, min_size=1, max_size=2)):
            part[field] = data.draw(ABSURD)
        (tmp_path / "config.json").write_text(json.dumps(config))
        for method in methods().values():
            method.recognises_head(HeadFiles(tmp_path, config))
        taken_or_refused(lambda: read(tmp_path, target))

    check()


@pytest.mark.parametrize("name", READERS)
def test_heads_that_do_not_fit_say_why(name: str, tmp_path: Path) -> None:
    target, read, write = READERS[name]
    write(tmp_path, None)
    for field in ("hidden_size", "vocab_size"):
        other = target[field] + 8
        with pytest.raises(ValueError, match=rf"{field} = {target[field]}, legal: {other}"):
            read(tmp_path, {**target, field: other})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    floats = [key for key, tensor in sorted(tensors.items()) if tensor.is_floating_point()]
    gone, other = floats[-1], floats[-2]
    del tensors[gone]
    save_file({**tensors, other: torch.zeros(3, 5, 7)}, file)
    # Names may have another prefix inside.
    missing, misshapen = gone.removeprefix("model."), other.partition(".")[2] or other
    with pytest.raises(ValueError, match=rf"missing {missing} .*misshapen \S*{misshapen}: config"):
        read(tmp_path, target)


@pytest.mark.parametrize("name", ["longspec", "tokenswift"])
@pytest.mark.parametrize("eps", ["0", "-1.0", "true", '"1e-6"', "[1e-6]", "1e400"])
def test_a_norm_needs_a_positive_epsilon(name: str, eps: str, tmp_path: Path) -> None:
    target, inspect, write = READERS[name]
    write(tmp_path, None)
    config = json.loads((tmp_path / "config.json").read_text())
    text = json.dumps({**config, "rms_norm_eps": "HERE"}).replace('"HERE"', eps)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="rms_norm_eps"):
        inspect(tmp_path, target)
