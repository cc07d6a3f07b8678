# SPDX-License-Identifier: Apache-2.0
"""Config and tensor headers of a draft checkpoint, by which methods recognise their heads.

See `Method.recognises`. No weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class HeadFiles:
    """Description of a draft checkpoint without its weights."""

    path: Path
    config: Mapping[str, Any]
    """Its config.json; empty if there is none."""
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of each tensor by its name without 'model.'."""
    dtypes: frozenset[str] = frozenset()
    """Dtypes of its tensors in safetensors, as that format names them."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """`architectures` of the config; empty if it has none."""
        stated = self.config.get("architectures")
        stated = stated if isinstance(stated, list) else []
        return tuple(name for name in stated if isinstance(name, str))

    @property
    def speculators_type(self) -> str | None:
        """`speculators_model_type` of the config, the kind of a head in speculators' format."""
        stated = self.config.get("speculators_model_type")
        return stated if isinstance(stated, str) else None

    def has_tensors(self, names: Iterable[str]) -> bool:
        """Whether the checkpoint has tensors of all `names`."""
        return set(names) <= set(self.tensors)

    def __str__(self) -> str:
        names = sorted(self.tensors)
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        stated = [
            f"{key} = {json.dumps(self.config[key])[:100]}"
            for key in ("architectures", "model_type", "speculators_model_type", "format")
            if self.config.get(key) is not None
        ]
        fallback = "a config without architectures" if self.config else f"no {CONFIG_NAME}"
        tensors = f"{len(names)} tensors: {shown}" if names else "no tensors"
        return f"{', '.join(stated) or fallback}; {tensors}"


def read_head_files(path: Path) -> HeadFiles:
    """Reads the config and the tensor headers of the checkpoint in folder `path`.

    Raises:
        ValueError: for files that cannot be read.
    """
    # Imported here, because it needs torch, which declarations of methods must not import.
    from vllm_specplug.drafting.checkpoint_files import (
        read_json_object,
        safetensors_header,
        weight_files,
    )

    config_file = path / CONFIG_NAME
    config = read_json_object(config_file, "a head's config") if config_file.is_file() else {}
    tensors: dict[str, tuple[int, ...]] = {}
    dtypes: set[str] = set()
    for file in weight_files(path):
        for name, (shape, dtype) in safetensors_header(file).items():
            tensors[name.removeprefix("model.")] = shape
            dtypes.add(dtype)
    if not tensors:
        for file in sorted(path.glob("*.bin")):
            if file.is_file():  # opening a named pipe would block
                tensors.update(_pickled_shapes(file))
    return HeadFiles(path, config, tensors, frozenset(dtypes))


def _pickled_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in a pickle; none if it cannot be read safely."""
    import torch

    from vllm_specplug.drafting.pickle_files import check_plain, load_pickle

    try:
        stored = load_pickle(file, str(file), mapped=True)
        tensors = {
            name.removeprefix("model."): tensor
            for name, tensor in stored.items()
            if isinstance(name, str) and isinstance(tensor, torch.Tensor)
        }
        check_plain(file, str(file), tensors)
    except ValueError:
        return {}  # the method's reader reports the problem
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
