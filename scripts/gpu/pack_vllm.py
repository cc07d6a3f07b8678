# SPDX-License-Identifier: Apache-2.0
"""Packs a slim vLLM for a GPU machine that has torch but no network.

    python scripts/gpu/pack_vllm.py FOLDER [--version 0.32.0] [--no-fa3] [--tests]

It downloads vLLM's CUDA wheel for Python 3.12 and missing packages, drops files that a dense model
does not load and code for other devices than sm_90, and writes FOLDER/vllm-VERSION.tar.xz (about
40 MB) and FOLDER/wheels/*.whl (about 18 MB) for `pack.py`.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# Packages that vLLM imports and a machine with only torch lacks.
MISSING = (
    "annotated-types", "apache-tvm-ffi", "cachetools", "cbor2", "compressed-tensors==0.17.0",
    "fastapi==0.136.3", "httpx2", "llguidance==1.7.6", "loguru", "msgspec", "openai",
    "openai-harmony", "partial-json-parser", "pybase64", "pydantic==2.14.3",
    "pydantic_core==2.50.4", "pyzmq", "sniffio", "starlette", "typing-inspection", "uvicorn",
    "watchfiles", "xgrammar==0.2.8",
)  # fmt: skip
# Packages that the tests import in addition.
TESTS = (
    "hypothesis", "iniconfig", "pluggy", "pygments", "pytest", "pytest-timeout",
    "sortedcontainers",
)  # fmt: skip

FATBIN_MAGIC = 0xBA55ED50
KIND_PTX, KIND_ELF = 1, 2
DROP = (
    "/_vllm_fa2_C", "/_moe_C", "/_flashmla", "/_flashkda", "/_deepselect", "/_qutlass",
    "third_party/deep_gemm/", "third_party/fmha_sm100/", "vllm/vllm-rs", "/_rust_tool",
    "/cumem_allocator", "instrumentator/static/", "fused_moe/configs/",
    "kernels/helion/configs/", "vllm_flash_attn/cute/",
)  # fmt: skip


def pip_download(dest: Path, *specs: str) -> None:
    tags = ["2_35", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17"]
    platforms = [f"manylinux_{t}_x86_64" for t in tags] + ["manylinux2014_x86_64"]
    platforms += ["manylinux1_x86_64", "manylinux_2_5_x86_64"]
    cmd = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(dest)]
    cmd += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for p in platforms:
        cmd += ["--platform", p]
    subprocess.run([*cmd, *specs], check=True)


def keep_only(path: Path, arch: int) -> tuple[int, int]:
    """Keeps in each fat binary of `path` only the code that a device of `arch` loads.

    The rest is overwritten with zeros, which compress well. Returns bytes (kept, total).
    """
    data = bytearray(path.read_bytes())
    sections = subprocess.run(
        ["readelf", "-SW", str(path)], capture_output=True, text=True, check=True
    ).stdout
    kept = total = 0
    for line in sections.splitlines():
        if ".nv_fatbin" not in line:
            continue
        fields = line[line.index(".nv_fatbin") :].split()
        pos, size = int(fields[3], 16), int(fields[4], 16)
        end = pos + size
        while pos < end:
            if struct.unpack_from("<I", data, pos)[0] != FATBIN_MAGIC:
                pos += 8
                continue
            _, header, body = struct.unpack_from("<HHQ", data, pos + 4)
            start, stop = pos + header, pos + header + body
            entries, at = [], start
            while at < stop:
                kind, _, head = struct.unpack_from("<HHI", data, at)
                (length,) = struct.unpack_from("<Q", data, at + 8)
                (cc,) = struct.unpack_from("<I", data, at + 28)
                entries.append((kind, cc, bytes(data[at : at + head + length])))
                at += head + length
            elf = [e for e in entries if e[0] == KIND_ELF and e[1] == arch]
            ptx = [e for e in entries if e[0] == KIND_PTX and e[1] <= arch]
            ptx.sort(key=lambda e: -e[1])
            chosen = elf or ptx[:1] or [min(entries, key=lambda e: len(e[2]))]
            blob = b"".join(e[2] for e in chosen)
            struct.pack_into("<Q", data, pos + 8, len(blob))
            data[start:stop] = blob + bytes(body - len(blob))
            kept, total, pos = kept + len(blob), total + body, stop
    path.write_bytes(data)
    return kept, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--version", default="0.32.0")
    parser.add_argument("--no-fa3", action="store_true", help="leave FlashAttention 3 out")
    parser.add_argument("--tests", action="store_true", help="add what the tests import (3 MB)")
    args = parser.parse_args()
    drop = DROP + (("/_vllm_fa3_C",) if args.no_fa3 else ())

    wheels = args.out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pip_download(wheels, *MISSING, *(TESTS if args.tests else ()))

    with tempfile.TemporaryDirectory() as tmp:
        pip_download(Path(tmp), f"vllm=={args.version}")
        site = Path(tmp) / "site"
        with zipfile.ZipFile(next(Path(tmp).glob("vllm-*.whl"))) as z:
            names = [n for n in z.namelist() if not any(d in n for d in drop)]
            z.extractall(site, names)
        kept, total = keep_only(site / "vllm" / "_C_stable_libtorch.abi3.so", arch=90)
        print(f"_C_stable_libtorch: kept {kept / 1e6:.1f} of {total / 1e6:.1f} MB of GPU code")
        archive = args.out / f"vllm-{args.version}.tar.xz"
        with tarfile.open(archive, "w:xz", preset=4) as tar:
            tar.add(site, arcname=".")
    files = [archive, *wheels.iterdir()]
    print(f"{sum(f.stat().st_size for f in files) / 2**20:.1f} MiB in {args.out}")


if __name__ == "__main__":
    main()
