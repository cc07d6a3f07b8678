# SPDX-License-Identifier: Apache-2.0
"""Run import-linter over the package as it is installed.

`vllm_specplug.kernels` lives in kernels/src and is mapped into the package at build time.
import-linter reads a package from one folder, so the tree is staged first: a temporary folder with
the sources of `vllm_specplug` and, below it, `kernels`. Extra arguments go to lint-imports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def stage(target: Path) -> None:
    """Copy the Python sources to `target`/vllm_specplug, kernels included."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "vllm_specplug", target / "vllm_specplug", ignore=ignore)
    kernels = ROOT / "kernels" / "src"
    if kernels.is_dir():
        shutil.copytree(kernels, target / "vllm_specplug" / "kernels", ignore=ignore)


def main(args: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="specplug-lint-") as folder:
        stage(Path(folder))
        # The staged copy must win over an editable install of the same package.
        env = dict(os.environ, PYTHONPATH=folder)
        command = [
            str(Path(sys.executable).with_name("lint-imports")),
            "--config",
            str(ROOT / "pyproject.toml"),
            "--no-cache",
            "--no-logo",
            *args,
        ]
        return subprocess.run(command, cwd=folder, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
