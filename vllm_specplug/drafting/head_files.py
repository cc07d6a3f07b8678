# SPDX-License-Identifier: Apache-2.0
"""Config and tensor headers of a draft checkpoint, by which methods recognise their heads.

See `Method.recognises`. No weight is read and no pickle is run.
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG_NAME = "config.json"
# The part of a torch archive that lists its tensors has some kilobytes.
_MAX_PICKLE_BYTES = 16 << 20


@dataclass(frozen=True)
class HeadFiles:
    """Description of a draft checkpoint without its weights."""

    path: Path
    config: Mapping[str, Any]
    """Its config.json; empty if there is none."""
    tensors: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Shape of each tensor by its name without 'model.'; None for tensors in pickles."""
    dtypes: frozenset[str] = frozenset()
    """Dtypes of its tensors, as safetensors names them."""

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
    from vllm_specplug.drafting.checkpoint_files import read_json_object, weight_files

    config_file = path / CONFIG_NAME
    config = read_json_object(config_file, "a head's config") if config_file.is_file() else {}
    tensors: dict[str, tuple[int, ...] | None] = {}
    dtypes: set[str] = set()
    for file in weight_files(path):
        for name, entry in _header(file).items():
            tensors[name.removeprefix("model.")] = tuple(entry["shape"])
            dtypes.add(entry["dtype"])
    if not tensors:
        for file in sorted(path.glob("*.bin")):
            if file.is_file():  # opening a named pipe would block
                tensors.update(dict.fromkeys(_pickled_names(file)))
    return HeadFiles(path, config, tensors, frozenset(dtypes))


def _header(file: Path) -> dict[str, Any]:
    """Returns the entries of a safetensors header by tensor name."""
    from vllm_specplug.drafting.checkpoint_files import check_header_length

    check_header_length(file)
    try:
        with file.open("rb") as stream:
            raw = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        entries = {name: entry for name, entry in raw.items() if name != "__metadata__"}
        for entry in entries.values():
            legal = all(isinstance(size, int) and size >= 0 for size in entry["shape"])
            if not legal or not isinstance(entry["dtype"], str):
                raise TypeError("illegal shape or dtype")
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}); fetch it again"
        ) from None
    return entries


def _pickled_names(file: Path) -> list[str]:
    """Returns the strings of a pickle that look like tensor names; the pickle is never run."""
    try:
        with zipfile.ZipFile(file) as archive:
            entry = next(e for e in archive.infolist() if e.filename.endswith("/data.pkl"))
            if entry.file_size > _MAX_PICKLE_BYTES:
                return []
            words = [arg for _, arg, _ in pickletools.genops(archive.read(entry))]
    except Exception:
        # Not an archive of torch. Each kind of archive raises other errors; the method's reader
        # reports the problem.
        return []
    names = [word for word in words if isinstance(word, str) and " " not in word]
    return [
        name.removeprefix("model.")
        for name in names
        if name in ("d2t", "t2d") or name.endswith((".weight", ".bias"))
    ]
