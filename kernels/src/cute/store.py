# SPDX-License-Identifier: Apache-2.0
"""Where compiled variants lie: shipped with the package, or in the user's cache.

Each is `<name>.cubin`, the machine code, and `<name>.ptx`, which a driver that refuses the machine
code may still compile, with `<name>.json` beside them. One whose recorded sources differ from those
at hand, or whose bytes are not those recorded, counts as absent: a stale kernel is worse than none.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import tempfile
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .config import CombineConfig, ForwardConfig

SHIPPED = Path(__file__).parent / "cubins"
# Sources that a cubin does not depend on.
_HOST_ONLY = ("__init__.py", "driver.py", "launch.py", "store.py")


class CuteUnavailable(RuntimeError):
    """The CuTe kernel cannot be had here; the message says why."""


@dataclass(frozen=True)
class StoredKernel:
    """A compiled variant; `images` are what the driver may load, best first."""

    name: str
    entry: str
    param_bytes: tuple[int, ...]
    cubin: bytes
    ptx: bytes

    @property
    def images(self) -> tuple[bytes, bytes]:
        return self.cubin, self.ptx


def sources() -> list[Path]:
    """Every source that a cubin is made from."""
    folder = Path(__file__).parent
    paths = sorted([*folder.glob("*.py"), folder.parent / "cuda_contract.py"])
    return [path for path in paths if path.name not in _HOST_ONLY]


def code_of(source: str) -> str:
    """`source` without comments, docstrings and empty lines."""
    # Not `ast.unparse`: what it writes differs between releases of Python.
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


@cache
def sources_digest() -> str:
    """Digest of the code of all `sources`: a change of a comment leaves cubins valid."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path.name}\0{code_of(path.read_text())}\0".encode())
    return digest.hexdigest()[:16]


def cache_root() -> Path | None:
    """$SPECPLUG_CACHE, or its default; None for a user without a home."""
    override = os.environ.get("SPECPLUG_CACHE")
    try:
        return Path(override).expanduser() if override else Path.home() / ".cache" / "specplug"
    except RuntimeError:
        return None


def cache_folder() -> Path:
    """Where compiled variants of these sources are kept for the user, or for this process."""
    root = cache_root() or Path(tempfile.gettempdir()) / f"specplug-{os.getpid()}"
    return root / "cubins" / sources_digest()


def as_stored(made) -> StoredKernel:
    """A `compile.Compiled` as it is stored."""
    return StoredKernel(made.name, made.entry, made.param_bytes, made.cubin, made.ptx.encode())


def write(folder: Path, kernel: StoredKernel) -> None:
    """Stores a kernel; a reader never sees half of one, as the record comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "entry": kernel.entry,
        "param_bytes": list(kernel.param_bytes),
        "sources": sources_digest(),
        "sha256": hashlib.sha256(kernel.cubin + kernel.ptx).hexdigest(),
    }
    files = {
        ".cubin": kernel.cubin,
        ".ptx": kernel.ptx,
        ".json": json.dumps(record).encode(),
    }
    for suffix, data in files.items():
        path = folder / (kernel.name + suffix)
        partial = path.with_suffix(f"{suffix}.{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(path)


def read(folder: Path, name: str) -> StoredKernel | str:
    """The stored kernel, or why it is not usable."""
    try:
        record = json.loads((folder / f"{name}.json").read_text())
        cubin = (folder / f"{name}.cubin").read_bytes()
        ptx = (folder / f"{name}.ptx").read_bytes()
        if record["sources"] != sources_digest():
            return "compiled from other sources"
        if record["sha256"] != hashlib.sha256(cubin + ptx).hexdigest():
            return "damaged"
        return StoredKernel(name, record["entry"], tuple(record["param_bytes"]), cubin, ptx)
    except FileNotFoundError:
        return "not there"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable ({error})"


def can_compile() -> bool:
    """Whether cutlass (the extra `cute`) is installed."""
    return importlib.util.find_spec("cutlass") is not None


def missing(config: ForwardConfig | CombineConfig) -> str | None:
    """Why a variant can neither be read nor compiled here, or None."""
    if can_compile():
        return None
    found = [read(folder, config.name) for folder in (SHIPPED, cache_folder())]
    if any(isinstance(item, StoredKernel) for item in found):
        return None
    return (
        f"no cubin of {config.name} (shipped: {found[0]}, cached: {found[1]}) and no cutlass to "
        "compile it; pip install 'vllm-specplug[cute]'"
    )


def obtain(config: ForwardConfig | CombineConfig) -> StoredKernel:
    """A variant from the package, else from the cache, else compiled now and cached.

    Raises:
        CuteUnavailable: naming each attempt's outcome.
    """
    for folder in (SHIPPED, cache_folder()):
        found = read(folder, config.name)
        if isinstance(found, StoredKernel):
            return found
    problem = missing(config)
    if problem is not None:
        raise CuteUnavailable(problem)
    try:
        from .compile import compile_config

        made = compile_config(config)
    except Exception as error:  # the compiler's errors have no common base
        raise CuteUnavailable(f"{config.name} does not compile here: {error}") from error
    kernel = as_stored(made)
    # A cache that cannot be written costs time at the next start, no more.
    with contextlib.suppress(OSError):
        write(cache_folder(), kernel)
    return kernel
