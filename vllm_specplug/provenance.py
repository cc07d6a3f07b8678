# SPDX-License-Identifier: Apache-2.0
"""What made a result or a head: command, commit, versions, hardware."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata as metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vllm-specplug", "vllm", "torch", "transformers")
_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
# Results and prose. Writing a result does not mark the next one.
_NOT_CODE = (":!bench/results", ":!docs", ":!*.md")
_TOOLS = ("bench", "train", "cli.py", "provenance.py", "targets.py")
CHANGES = "+changes"
"""Suffix of a commit whose checkout had uncommitted changes."""


class UncommittedChanges(ValueError):
    """A measurement could not be repeated from a commit."""


def provenance(execution: str | None = None, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Returns command line, commit, package versions and hardware of this process.

    Args:
        execution: "compiled" (as vLLM runs by default) or "eager", for all sides of a comparison;
            None if no model runs in vLLM.
        packages: distributions whose versions are recorded if they are installed.
    """
    return {
        "command": tidy(shlex.join([*_program(), *sys.argv[1:]])),
        "commit": commit(),
        **({} if execution is None else {"execution": execution}),
        "versions": versions(packages),
        "hardware": hardware(),
    }


def tidy(command: str) -> str:
    """Returns a command line with paths relative to the working folder, and "~" for home."""
    for folder, short in ((Path.cwd(), ""), (Path.home(), "~/")):
        command = command.replace(f"{folder}/", short)
    return command


def _program() -> list[str]:
    """Returns the running script as a user calls it: "python bench/NAME.py", or a command."""
    path = Path(sys.argv[0])
    if path.suffix != ".py":
        return [path.name]
    inside = path.resolve().is_relative_to(_ROOT)
    return ["python", str(path.resolve().relative_to(_ROOT)) if inside else path.name]


def require_committed(allow_changes: bool) -> None:
    """Raises UncommittedChanges if code differs from the commit, unless `allow_changes`."""
    made_from = commit()
    if not allow_changes and made_from is not None and made_from.endswith(CHANGES):
        raise UncommittedChanges(
            f"the checkout is {made_from}: numbers of uncommitted code cannot be repeated. Commit "
            "first, or pass --allow-changes; the results are then marked."
        )


def commit() -> str | None:
    """Returns the commit of the package's checkout, with `CHANGES` if its code differs; None
    without a repository. SPECPLUG_COMMIT names the commit on machines without one."""
    if named := os.environ.get("SPECPLUG_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *_NOT_CODE)
        return git("rev-parse", "--short=12", "HEAD") + (CHANGES if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def code_fingerprint(head: str | None) -> str:
    """Returns a digest of the package without its tools, the kernels and the draft head.

    Results of different fingerprints do not belong in one table.
    """
    package = _ROOT / "vllm_specplug"
    files = [
        path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in _TOOLS
    ]
    files += _ROOT.glob("kernels/src/*")
    if head is not None:
        files += Path(head).glob("*.safetensors")
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def hardware() -> dict[str, Any]:
    """Returns CPU name, usable logical CPUs, vector extensions, memory in GiB and GPUs."""
    name, flags = platform.processor() or platform.machine(), set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    except OSError:
        pass
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": name,
        "logical_cpus": len(os.sched_getaffinity(0)),
        "extensions": [flag for flag in _CPU_FLAGS if flag in flags],
        "memory_gib": round(pages * page_size / 2**30, 1),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    try:
        done = subprocess.run(_GPU_QUERY, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def one_line(record: dict[str, Any]) -> str:
    """Returns a record as one line of text, for the end of a page."""
    machine, versions = record["hardware"], record["versions"]
    packages = ", ".join(f"{key} {value}" for key, value in versions.items() if value)
    gpus = "".join(f"; {name}" for name in machine.get("gpus", ()))
    execution = f", {record['execution']}" if record.get("execution") else ""
    # Runs on a GPU record less of their host.
    host = f"{machine['cpu']}, " if "cpu" in machine else ""
    host += f"{machine['logical_cpus']} logical CPUs"
    if "extensions" in machine:
        host += f" ({', '.join(machine['extensions'])}), {machine['memory_gib']} GiB"
    return f"`{record['command']}`, commit {record['commit']}{execution}; {host}{gpus}; {packages}"
