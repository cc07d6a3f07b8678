# SPDX-License-Identifier: Apache-2.0
"""Reads EAGLE-3 heads that are released as `pytorch_model.bin`, which is a pickle.

The pickle is read in weights-only mode. Once it has passed all checks, it is stored as safetensors
in the same folder, if that is writable. The copy names its source and is replaced when that file
changes.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from safetensors import safe_open

from vllm_specplug.drafting.checkpoint_files import (
    check_finite,
    check_header_length,
    read_safetensors,
    write_safetensors,
)
from vllm_specplug.drafting.pickle_files import check_plain, load_pickle

logger = logging.getLogger("vllm.specplug.config")

PICKLE_NAME = "pytorch_model.bin"
COPY_NAME = "pytorch_model.safetensors"
# Tables that some trainers save. They follow from the config.
IGNORED = re.compile(r"((midlayer|layers\.0)\.self_attn\.)?rotary_emb\..*|t2d")
_SOURCE = "specplug_source"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


def is_pickled(directory: Path) -> bool:
    """Returns whether a head's weights are a pickle, with at most this package's copy of it."""
    if not (directory / PICKLE_NAME).is_file():
        return False
    found = {path.name for path in directory.glob("*.safetensors*")}
    return not found or (found == {COPY_NAME} and _source_of(directory / COPY_NAME) is not None)


def read_pickled(directory: Path, headers_only: bool) -> dict[str, torch.Tensor]:
    """Returns the tensors by name without 'model.', from the copy if it is up to date.

    Raises:
        ValueError: for a pickle with anything but a head's tensors, or with non-finite values.
    """
    if _is_current(directory):
        return read_safetensors([directory / COPY_NAME], headers_only=headers_only)
    return _read_pickle(directory / PICKLE_NAME, headers_only)


def convert_once(directory: Path) -> None:
    """Writes the copy of a head that has passed its checks, unless it is up to date.

    Raises:
        ValueError: for non-finite values.
    """
    if _is_current(directory):
        return
    pickle = directory / PICKLE_NAME
    tensors = _read_pickle(pickle, headers_only=False)
    kept = {n: t.contiguous() for n, t in tensors.items() if IGNORED.fullmatch(n) is None}
    try:
        write_safetensors(directory / COPY_NAME, kept, {_SOURCE: _source_name(pickle)})
        logger.info("Converted %s to %s", pickle, COPY_NAME)
    except OSError as error:
        logger.info("%s is read as it is; no copy could be written (%s)", pickle, error)


def _source_name(pickle: Path) -> str:
    stat = pickle.stat()
    return f"{pickle.name} {stat.st_size} {stat.st_mtime_ns}"


def _source_of(copy: Path) -> str | None:
    """Returns the source that a copy names; None for a file of another writer."""
    try:
        check_header_length(copy)
        with safe_open(copy, framework="pt") as handle:
            return (handle.metadata() or {}).get(_SOURCE)
    except Exception:  # safetensors has its own errors; the reader of the file reports them
        return None


def _is_current(directory: Path) -> bool:
    copy = directory / COPY_NAME
    return copy.is_file() and _source_of(copy) == _source_name(directory / PICKLE_NAME)


def _read_pickle(path: Path, headers_only: bool) -> dict[str, torch.Tensor]:
    """Returns the tensors of a `.bin` file, which is mapped into memory."""
    what = f"draft head {str(path)!r}"
    read = load_pickle(path, what, mapped=True)
    check_plain(path, what, read)
    found: dict[str, torch.Tensor] = {}
    for full_name, tensor in read.items():
        name = full_name.removeprefix("model.")
        if name in found:
            raise ValueError(
                f"{what}: tensor {name!r} is given twice, with 'model.' and without; fetch the "
                "head again"
            )
        found[name] = tensor
        legal: tuple[torch.dtype, ...] = _INTEGERS if name == "d2t" else _DTYPES
        if IGNORED.fullmatch(name):
            legal = (*_DTYPES, *_INTEGERS, torch.bool, torch.uint8)
        if tensor.dtype not in legal:
            raise ValueError(
                f"{what}: tensor {name!r} has dtype {tensor.dtype}, legal: "
                f"{', '.join(str(dtype) for dtype in legal)}; use the head's original weights"
            )
    if headers_only:
        return {n: torch.empty(tensor.shape, device="meta") for n, tensor in found.items()}
    check_finite(found)
    # Copied: a change of the file must not change a server's weights.
    return {name: tensor.clone() for name, tensor in found.items()}
