# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is, by its files: names and shapes alone, whatever holds them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_specplug.drafting.head_files import read_head_files

TENSORS = {"model.fc.weight": torch.zeros(2, 6), "d2t": torch.zeros(5, dtype=torch.int64)}


def test_names_and_shapes_of_shards(tmp_path: Path) -> None:
    names = dict(zip(TENSORS, ("a.safetensors", "b.safetensors"), strict=True))
    for name, file in names.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A", 3], "x": None}))
    head = read_head_files(tmp_path)
    assert head.tensors == {"fc.weight": (2, 6), "d2t": (5,)}
    assert head.dtypes == {"F32", "I64"}
    assert head.architectures == ("A",) and head.speculators_type is None
    assert "2 tensors: d2t, fc.weight" in str(head) and '["A", 3]' in str(head)


def test_tensors_of_a_pickle_are_listed_and_nothing_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> object:
            return (Path.touch, (tmp_path / "was_run",))

    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    head = read_head_files(tmp_path)
    assert head.tensors == {"fc.weight": (2, 6), "d2t": (5,)}
    assert str(head) == "no config.json; 2 tensors: d2t, fc.weight"
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    # Tensors that no head has are not listed either, nor is a file that is none.
    for more in ({"evil": Evil()}, {"n": nested}, {"n" * (16 << 20): torch.ones(1)}):
        torch.save({**TENSORS, **more}, tmp_path / "pytorch_model.bin")
        assert read_head_files(tmp_path).tensors == {}
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nothing")
    assert read_head_files(tmp_path).tensors == {}
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    "header",
    [
        b"[1]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"shape": [-1], "dtype": "F32"}}',
        b'{"a": {"shape": 3, "dtype": "F32"}}',
        b'{"a": {"shape": [1], "dtype": null}}',
        b"[" * 100_000,
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        read_head_files(tmp_path)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """Whoever opens a pipe waits for its writer."""
    pipe = tmp_path / "pytorch_model.bin"
    os.mkfifo(pipe)
    reader = threading.Thread(target=read_head_files, args=(tmp_path,), daemon=True)
    reader.start()
    reader.join(5)
    waits = reader.is_alive()
    os.close(os.open(pipe, os.O_RDWR))
    assert not waits
