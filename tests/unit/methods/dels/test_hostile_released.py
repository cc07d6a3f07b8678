# SPDX-License-Identifier: Apache-2.0
"""Files released as pickles or archives: bounded, finite and plain from the first read on."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.methods.absurd import ABSURD, refused, taken_or_refused
from tests.unit.methods.dels.local_heads import TARGET, V, released
from vllm_specplug.methods.dels.checkpoint import inspect_local_head, load_local_head
from vllm_specplug.methods.dels.unigram import load_unigram, log_prior


def deflated(file: Path) -> None:
    """The same archive with its entries compressed."""
    entries = {}
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_of_a_released_head_are_finite_at_the_first_read(tmp_path: Path, value) -> None:
    raw = released("gru_factorized")
    raw["model_state_dict"]["rank_proj.weight"][1, 2] = value
    file = tmp_path / "local_head.pt"
    torch.save(raw, file)
    for read in (inspect_local_head, load_local_head):
        refused(lambda read=read: read(file, TARGET), "rank_proj.weight", "not finite")


def test_a_released_head_of_another_target_is_refused(tmp_path: Path) -> None:
    torch.save(released("gru_factorized"), tmp_path / "local_head.pt")
    refused(lambda: inspect_local_head(tmp_path, {**TARGET, "vocab_size": V + 1}), "vocab_size")


def test_compressed_pickles_are_not_unpacked(tmp_path: Path) -> None:
    raw = {**released("gru_factorized"), "padding": torch.zeros(1_000_000)}
    file = tmp_path / "local_head.pt"
    torch.save(raw, file)
    deflated(file)
    refused(lambda: inspect_local_head(file, TARGET), "compressed")
    counts = tmp_path / "loss_mask_unigram.pt"
    torch.save({"counts": torch.zeros(V, dtype=torch.int64)}, counts)
    deflated(counts)
    refused(lambda: load_unigram(counts), "compressed")


def program(text: bytes, tensors: dict[str, bytes] | None = None) -> bytes:
    """An archive as torch.save writes it, around a pickle of our own."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", text)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        for name, data in (tensors or {}).items():
            archive.writestr(f"archive/data/{name}", data)
    return stream.getvalue()


def call(module: str, name: str, size: int) -> bytes:
    """A pickle of {"counts": module.name(size)}."""
    number = b"\x8a\x08" + struct.pack("<q", size)
    made = f"c{module}\n{name}\n".encode() + number + b"\x85R"
    return b"\x80\x02}X\x06\x00\x00\x00counts" + made + b"s."


@pytest.mark.parametrize(
    ("module", "name", "size"),
    [
        ("builtins", "bytearray", 4 << 30),
        ("torch", "Tensor", 1 << 31),
        ("torch", "Tensor", 1 << 42),
    ],
)
def test_pickles_that_ask_for_memory_get_none(tmp_path: Path, module, name, size) -> None:
    for file, read in (
        (tmp_path / "local_head.pt", lambda f: inspect_local_head(f, TARGET)),
        (tmp_path / "loss_mask_unigram.pt", load_unigram),
    ):
        file.write_bytes(program(call(module, name, size)))
        refused(lambda file=file, read=read: read(file), file.name)


def expanded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype).expand(shape)


@pytest.mark.parametrize(
    "tensor",
    [
        expanded((1 << 20, 1 << 20), torch.float32),
        torch.sparse_coo_tensor(torch.zeros(2, 1).long(), torch.ones(1), (1 << 20, 1 << 20)),
        torch.zeros(3),
        torch.tensor(1.0),
        torch.zeros(2, 3, 4),
        torch.zeros(6, 10, dtype=torch.int8),
        torch.zeros(6, 10, dtype=torch.complex64),
        torch.empty(6, 10, device="meta"),
        "a word",
        None,
        [1.0, 2.0],
    ],
    ids=lambda value: type(value).__name__ + str(getattr(value, "dtype", "")),
)
def test_what_is_no_plain_matrix_is_refused(tmp_path: Path, tensor) -> None:
    raw = released("gru_target_head")
    raw["model_state_dict"]["rank_to_hidden.weight"] = tensor
    file = tmp_path / "local_head.pt"
    torch.save(raw, file)
    refused(lambda: inspect_local_head(file, TARGET), "rank_to_hidden.weight")


def test_names_that_are_none(tmp_path: Path) -> None:
    raw = released("gru_factorized")
    raw["model_state_dict"][3] = torch.zeros(2, 2)
    torch.save(raw, tmp_path / "local_head.pt")
    refused(lambda: inspect_local_head(tmp_path, TARGET), "local_head.pt")


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


class TestUnigram:
    @pytest.mark.parametrize(
        "counts",
        [
            expanded((1 << 36,), torch.int64),
            torch.sparse_coo_tensor(torch.zeros(1, 1).long(), torch.ones(1).long(), (1 << 36,)),
            torch.empty(5, dtype=torch.int64, device="meta"),
            torch.ones((1 << 24) + 1, dtype=torch.uint8),
            torch.tensor([1, -1]),
            torch.tensor([True, False]),
            torch.tensor(3),
            torch.ones(3),
            "counts",
        ],
        ids=range(9),
    )
    def test_counts_that_are_none(self, tmp_path: Path, counts) -> None:
        torch.save({"counts": counts}, tmp_path / "c.pt")
        refused(lambda: load_unigram(tmp_path / "c.pt"), "c.pt")

    def test_more_counts_than_any_vocabulary(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        save_file({"counts": torch.ones((1 << 24) + 1).long()}, tmp_path / "c.safetensors")
        refused(lambda: load_unigram(tmp_path / "c.safetensors"), "c.safetensors", "at most")
        (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}" * 8)
        refused(lambda: load_unigram(tmp_path / "c.safetensors"), "c.safetensors", "header")

    def test_counts_near_the_largest_integer_are_probabilities(self, tmp_path: Path) -> None:
        torch.save({"counts": torch.tensor([(1 << 63) - 1] * 4)}, tmp_path / "c.pt")
        log_probs = log_prior(load_unigram(tmp_path / "c.pt"), 4)
        torch.testing.assert_close(log_probs, torch.full((4,), 0.25).log())

    def test_a_pickle_of_another_kind(self, tmp_path: Path) -> None:
        for data in (pickle.dumps({"counts": [1]}), b"", b"PK\x03\x04", b"\x80\x02."):
            (tmp_path / "c.pt").write_bytes(data)
            refused(lambda: load_unigram(tmp_path / "c.pt"), "c.pt")
