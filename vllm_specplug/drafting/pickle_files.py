# SPDX-License-Identifier: Apache-2.0
"""Reads released pickles as untrusted input.

A pickle is a program. torch's weights-only loader allows only a few known calls, but these can
allocate any amount of memory. The checks here limit the memory to the file's size.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# The only allowed call that fills memory by itself; tensors do not need it.
_BYTEARRAY_GLOBAL = b"bytearray"
# Far beyond the names and shapes of any head. Unpickling takes seconds and 100 MB per MiB.
_MAX_PICKLE = 16 << 20


def load_pickle(
    path: Path, what: str, safe: Sequence[type] = (), mapped: bool = False
) -> Mapping[str, Any]:
    """Returns the mapping in a file of torch.save, read in weights-only mode.

    Args:
        path: the file.
        what: the file, for the message.
        safe: classes without behaviour that may occur.
        mapped: whether tensors are memory-mapped views of the file.

    Raises:
        ValueError: for files that torch.save did not write, that are compressed, that hold values
            other than tensors and plain ones, and that hold no mapping.
    """
    try:
        _check_archive(path)
        with torch.serialization.safe_globals(list(safe)):
            raw = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{what} cannot be read in weights-only mode ({reason}); legal: tensors and plain "
            "values. Save only the tensors and the model config, where you trust the file"
        ) from None
    if not isinstance(raw, Mapping):
        raise ValueError(f"{what} is a {type(raw).__name__}, legal: a mapping")
    return raw


def _check_archive(path: Path) -> None:
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        packed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(
                f"its entry {packed[0]!r} is compressed, which torch.save never does: it may "
                "unpack to any size"
            )
        # Overlapping entries would make a large tensor of a small file.
        total = sum(entry.file_size for entry in entries)
        if total > size:
            raise ValueError(f"its entries claim {total} bytes, the file has {size}")
        for entry in entries:
            if not entry.filename.endswith("data.pkl"):
                continue
            if entry.file_size > _MAX_PICKLE:
                raise ValueError(f"its pickle has {entry.file_size} bytes, the limit is 16 MiB")
            if _BYTEARRAY_GLOBAL in archive.read(entry):
                raise ValueError("its pickle makes a bytearray")


def check_plain(path: Path, what: str, tensors: Mapping[str, Any]) -> None:
    """Refuses values that are not dense tensors of at most the file's size.

    Raises:
        ValueError: naming the first one, in `what`.
    """
    size = path.stat().st_size
    for name, tensor in tensors.items():
        is_plain = (
            isinstance(name, str)
            and isinstance(tensor, torch.Tensor)
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and not tensor.is_quantized
            and not tensor.is_nested
        )
        # A view can repeat its elements, and an allowed call can make a tensor of any size.
        if not is_plain or tensor.numel() * tensor.element_size() > size:
            # A nested tensor has no shape.
            shown = f" {list(tensor.shape)}" if is_plain else ""
            raise ValueError(
                f"{what}: {repr(name)[:100]} is a {type(tensor).__name__}{shown}, legal: a dense "
                "tensor no larger than its file. Do not use this file"
            )
