# SPDX-License-Identifier: Apache-2.0
"""Reads EAGLE-3 heads that are released as `pytorch_model.bin`, which is a pickle.

It is read in weights-only mode, which runs no code of the file.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from vllm_specplug.drafting.checkpoint_files import check_finite
from vllm_specplug.drafting.pickle_files import check_plain, load_pickle

PICKLE_NAME = "pytorch_model.bin"
# Tables that some trainers save. They follow from the config.
IGNORED = re.compile(r"((midlayer|layers\.0)\.self_attn\.)?rotary_emb\..*|t2d")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


def is_pickled(directory: Path) -> bool:
    """Returns whether a head's weights are only in a pickle."""
    has_pickle = (directory / PICKLE_NAME).is_file()
    return has_pickle and not any(directory.glob("*.safetensors*"))


def read_pickled(directory: Path, headers_only: bool) -> dict[str, torch.Tensor]:
    """Returns the tensors by name without 'model.', from the file mapped into memory.

    Raises:
        ValueError: for a pickle with anything but a head's tensors, or with non-finite values.
    """
    path = directory / PICKLE_NAME
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
