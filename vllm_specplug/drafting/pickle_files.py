# SPDX-License-Identifier: Apache-2.0
"""Files that others release as pickles, read as untrusted input.

A pickle is a program. torch's weights-only loader allows few calls, none of the file's own, but
those can still ask for any amount of memory. Nothing here fills more memory than the file is long.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# The only allowed call of a pickle that fills memory by itself; tensors have no need of it.
_BYTEARRAY_GLOBAL = b"bytearray"


def load_pickle(
    path: Path, what: str, safe: Sequence[type] = (), mapped: bool = False
) -> Mapping[str, Any]:
    """The mapping in a file of torch.save, in weights-only mode.

    Args:
        path: the file.
        what: the file, for the message.
        safe: classes without behaviour that may occur.
        mapped: tensors are views of the file, which read what is used of them.

    Raises:
        ValueError: for files that torch.save did not write, that are compressed, that hold other
            than tensors and plain values, and that are not a mapping with names.
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
                f"{packed[0]!r} in it is compressed, which torch.save never does: it may unpack to "
                "any size"
            )
        # Overlapping entries would make a large tensor of a small file.
        total = sum(entry.file_size for entry in entries)
        if total > size:
            raise ValueError(f"its entries claim {total} bytes, the file has {size}")
        for entry in entries:
            if entry.filename.endswith("data.pkl") and _BYTEARRAY_GLOBAL in archive.read(entry):
                raise ValueError("its pickle makes a bytearray")


def check_plain(path: Path, what: str, tensors: Mapping[str, Any]) -> None:
    """Refuses what is no dense tensor whose elements the file holds.

    Raises:
        ValueError: naming the first that is none; `what` says whose.
    """
    size = path.stat().st_size
    for name, tensor in tensors.items():
        plain = (
            isinstance(name, str)
            and isinstance(tensor, torch.Tensor)
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and not tensor.is_quantized
        )
        # A view can repeat its elements, and an allowed call make a tensor of any size.
        if not plain or tensor.numel() * tensor.element_size() > size:
            shown = list(tensor.shape) if isinstance(tensor, torch.Tensor) else repr(tensor)[:100]
            raise ValueError(
                f"{what}: {repr(name)[:100]} is a {type(tensor).__name__} {shown}, legal: a dense "
                "tensor no larger than its file. Do not use this file"
            )
