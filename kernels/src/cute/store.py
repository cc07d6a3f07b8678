# SPDX-License-Identifier: Apache-2.0
"""Stores compiled variants, in the package or in the user's cache.

A variant is `<name>.cubin`, `<name>.ptx` (for drivers that refuse the cubin) and `<name>.json`. It
counts as absent if the recorded digest of its sources or of its bytes does not match.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import tempfile
from functools import cache
from pathlib import Path

from .compile import CompiledKernel
from .config import CombineConfig, ForwardConfig

SHIPPED = Path(__file__).parent / "cubins"
# Modules that cubins do not depend on.
_HOST_ONLY = ("__init__.py", "driver.py", "launch.py", "store.py")


class CuteUnavailable(RuntimeError):
    """The CuTe kernel is unavailable; the message says why."""


def sources() -> list[Path]:
    """Returns all sources that a cubin depends on."""
    folder = Path(__file__).parent
    paths = sorted([*folder.glob("*.py"), folder.parent / "cuda_contract.py"])
    return [path for path in paths if path.name not in _HOST_ONLY]


@cache
def sources_digest() -> str:
    """Returns the digest of all `sources`."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path.name}\0{path.read_text()}\0".encode())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Returns the folder for variants of these sources: in $SPECPLUG_CACHE or its default, for a
    user without a home directory a temporary one."""
    override = os.environ.get("SPECPLUG_CACHE")
    try:
        root = Path(override).expanduser() if override else Path.home() / ".cache" / "specplug"
    except RuntimeError:
        root = Path(tempfile.gettempdir()) / f"specplug-{os.getpid()}"
    return root / "cubins" / sources_digest()


def write(folder: Path, kernel: CompiledKernel) -> None:
    """Stores a kernel. The record is written last, so a reader never sees an incomplete one."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "entry": kernel.entry,
        "param_bytes": list(kernel.param_bytes),
        "sources": sources_digest(),
        "sha256": hashlib.sha256(b"".join(kernel.images)).hexdigest(),
    }
    files = {
        ".cubin": kernel.cubin,
        ".ptx": kernel.ptx.encode(),
        ".json": json.dumps(record).encode(),
    }
    for suffix, data in files.items():
        path = folder / (kernel.name + suffix)
        partial = path.with_suffix(f"{suffix}.{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(path)


def read(folder: Path, name: str) -> CompiledKernel | str:
    """Returns the stored kernel, or why it is not usable."""
    try:
        record = json.loads((folder / f"{name}.json").read_text())
        cubin = (folder / f"{name}.cubin").read_bytes()
        ptx = (folder / f"{name}.ptx").read_bytes()
        if record["sources"] != sources_digest():
            return "compiled from other sources"
        if record["sha256"] != hashlib.sha256(cubin + ptx).hexdigest():
            return "damaged"
        param_bytes = tuple(record["param_bytes"])
        return CompiledKernel(name, record["entry"], param_bytes, cubin, ptx.decode())
    except FileNotFoundError:
        return "not there"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable ({error})"


def can_compile() -> bool:
    """Whether cutlass (the extra `cute`) is installed."""
    return importlib.util.find_spec("cutlass") is not None


def missing(config: ForwardConfig | CombineConfig) -> str | None:
    """Returns why a variant can be neither read nor compiled, or None."""
    if can_compile():
        return None
    found = [read(folder, config.name) for folder in (SHIPPED, cache_folder())]
    if any(isinstance(item, CompiledKernel) for item in found):
        return None
    return (
        f"no cubin of {config.name} (shipped: {found[0]}, cached: {found[1]}) and no cutlass to "
        "compile it; pip install 'vllm-specplug[cute]'"
    )


def obtain(config: ForwardConfig | CombineConfig) -> CompiledKernel:
    """Returns a variant from the package or the cache; otherwise compiles and caches it.

    Raises:
        CuteUnavailable: with the outcome of each attempt.
    """
    for folder in (SHIPPED, cache_folder()):
        found = read(folder, config.name)
        if isinstance(found, CompiledKernel):
            return found
    problem = missing(config)
    if problem is not None:
        raise CuteUnavailable(problem)
    try:
        from .compile import compile_config

        kernel = compile_config(config)
    except Exception as error:  # the compiler's errors have no common base
        raise CuteUnavailable(f"{config.name} does not compile here: {error}") from error
    # If the cache is not writable, the next start only takes longer.
    with contextlib.suppress(OSError):
        write(cache_folder(), kernel)
    return kernel
