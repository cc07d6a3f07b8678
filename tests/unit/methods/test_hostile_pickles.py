# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save run nothing, and are bounded, finite and plain, whoever reads them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.unit.methods.absurd import ABSURD, refused, taken_or_refused
from tests.unit.methods.dels.local_heads import TARGET, V, released
from tests.unit.methods.eagle3_tree.heads import write_head
from tests.unit.methods.eagle3_tree.published import SMALL
from vllm_specplug.methods.dels.checkpoint import inspect_local_head, load_local_head
from vllm_specplug.methods.dels.unigram import load_unigram, log_prior
from vllm_specplug.methods.eagle3_tree.checkpoint import inspect_eagle3_head, load_eagle3_head

# A file, what it holds, the part with the tensors, one of their names, and a reader.
Reader = tuple[Path, dict[Any, Any], dict[Any, Any], str, Callable[[], Any]]


def _eagle3(folder: Path) -> Reader:
    _, tensors = write_head(folder, "yuhuili")
    read = lambda: load_eagle3_head(folder, SMALL)  # noqa: E731
    return folder / "pytorch_model.bin", tensors, tensors, "norm.weight", read


def _local(folder: Path) -> Reader:
    raw, file = released("gru_factorized"), folder / "local_head.pt"
    read = lambda: inspect_local_head(file, TARGET)  # noqa: E731
    return file, raw, raw["model_state_dict"], "rank_proj.weight", read


def _unigram(folder: Path) -> Reader:
    raw: dict[Any, Any] = {"counts": torch.ones(V, dtype=torch.int64)}
    file = folder / "loss_mask_unigram.pt"
    return file, raw, raw, "counts", lambda: load_unigram(file)


READERS = pytest.mark.parametrize("make", [_eagle3, _local, _unigram])


class Bomb:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "owned"),)


def deflated(content: bytes) -> bytes:
    """The same archive with its entries compressed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def call(module: str, name: str, size: int) -> bytes:
    """An archive as torch.save writes it, around a pickle of {"counts": module.name(size)}."""
    number = b"\x8a\x08" + struct.pack("<q", size)
    made = f"c{module}\n{name}\n".encode() + number + b"\x85R"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}X\x06\x00\x00\x00counts" + made + b"s.")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return stream.getvalue()


def saved(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


@READERS
def test_pickles_run_nothing_and_get_no_memory(make: Any, tmp_path: Path) -> None:
    file, raw, _, _, read = make(tmp_path)
    bomb, padding = Bomb(tmp_path), torch.zeros(1_000_000)
    for content in (
        saved({**raw, "evil": bomb}), pickle.dumps(bomb), pickle.dumps({"counts": [1]}),
        deflated(saved({**raw, "padding": padding})), saved({**raw, "n" * (16 << 20): padding[:1]}),
        call("builtins", "bytearray", 4 << 30), call("torch", "Tensor", 1 << 31),
        call("torch", "Tensor", 1 << 42), b"", b"PK\x03\x04", b"\x80\x02.",
    ):  # fmt: skip
        file.write_bytes(content)
        refused(read, str(tmp_path))
    assert not (tmp_path / "owned").exists()


def expanded(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype).expand(shape)


@READERS
@pytest.mark.parametrize(
    "tensor",
    [
        expanded((1 << 20, 1 << 20)), expanded((1 << 36,), torch.int64),
        torch.zeros(2, 2).to_sparse(), torch.empty(6, 10, device="meta"), torch.tensor(1.0),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        torch.zeros(2, 3, 4), torch.zeros(6, 10, dtype=torch.complex64),
        torch.zeros(6, 10, dtype=torch.bool), "a word", None, [1.0, 2.0], 3,
    ],
    ids=range(13),
)  # fmt: skip
def test_what_is_no_plain_tensor_is_named(make: Any, tensor: Any, tmp_path: Path) -> None:
    file, raw, tensors, name, read = make(tmp_path)
    tensors[name] = tensor
    torch.save(raw, file)
    refused(read, name)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("make", [_eagle3, _local])
def test_values_are_finite_at_the_first_read(make: Any, value: float, tmp_path: Path) -> None:
    file, raw, tensors, name, read = make(tmp_path)
    tensors[name] = tensors[name].clone().fill_(value)
    torch.save(raw, file)
    before = sorted(tmp_path.iterdir())
    refused(read, name, "not finite")
    # Nothing that was refused is left behind to be read later.
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_pickled_eagle3_head_holds_floats_and_each_tensor_once(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    write_head(tmp_path, "yuhuili", extra={"norm.weight": torch.ones(16, dtype=dtype)})
    for read in (load_eagle3_head, inspect_eagle3_head):
        refused(lambda read=read: read(tmp_path, SMALL), "'norm.weight' has dtype", str(dtype))
    write_head(tmp_path, "yuhuili", extra={"model.norm.weight": torch.ones(16)})
    refused(lambda: load_eagle3_head(tmp_path, SMALL), "'norm.weight' is given twice")


def test_a_local_head_is_a_set_of_matrices_for_its_target(tmp_path: Path) -> None:
    file, raw, tensors, name, read = _local(tmp_path)
    torch.save(raw, file)
    other = {**TARGET, "vocab_size": V + 1}
    for reader in (inspect_local_head, load_local_head):
        refused(lambda reader=reader: reader(tmp_path, other), "vocab_size")
    assert [path.name for path in tmp_path.iterdir()] == ["local_head.pt"], "nothing is converted"
    for tensor in (torch.zeros(3), torch.zeros(6, 10, dtype=torch.int8)):
        torch.save({**raw, "model_state_dict": {**tensors, name: tensor}}, file)
        refused(read, name)
    torch.save({**raw, "model_state_dict": {**tensors, 3: torch.zeros(2, 2)}}, file)
    refused(read, "local_head.pt")


@settings(max_examples=60)
@given(data=st.data())
def test_any_value_in_any_field_of_a_release_is_taken_or_refused(
    data: st.DataObject, tmp_path_factory: Any
) -> None:
    raw = released(data.draw(st.sampled_from(["gru_factorized", "markov_direct"])))
    inner = raw.get("model_config", raw)
    inner[data.draw(st.sampled_from(sorted(inner) + ["target_hidden_size"]))] = data.draw(ABSURD)
    file = tmp_path_factory.mktemp("release") / "local_head.pt"
    try:
        torch.save(raw, file)
    except RuntimeError:
        return
    taken_or_refused(lambda: inspect_local_head(file, TARGET))


def test_counts_are_those_of_a_vocabulary(tmp_path: Path) -> None:
    file, *_ = _unigram(tmp_path)
    for counts in (torch.ones((1 << 24) + 1, dtype=torch.uint8), torch.tensor([1, -1])):
        torch.save({"counts": counts}, file)
        refused(lambda: load_unigram(file), file.name)
    other = tmp_path / "c.safetensors"
    save_file({"counts": torch.ones((1 << 24) + 1).long()}, other)
    refused(lambda: load_unigram(other), other.name, "at most")
    other.write_bytes(struct.pack("<Q", 1 << 40) + b"{}" * 8)
    refused(lambda: load_unigram(other), other.name, "header")
    # Counts near the largest integer are probabilities.
    torch.save({"counts": torch.tensor([(1 << 63) - 1] * 4)}, file)
    log_probs = log_prior(load_unigram(file), 4)
    torch.testing.assert_close(log_probs, torch.full((4,), 0.25).log())
