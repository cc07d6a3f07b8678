# SPDX-License-Identifier: Apache-2.0
"""Compiles variants of Triton kernels for a GPU that need not be there.

`python -m tests.ptx.triton_compile ARCH` reads pickled `Variant`s and prints the JSON of one
`Compiled` per line. It is a process of its own, because a process whose kernels run in the
interpreter cannot compile them.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from tests.kernels.triton_launches import Variant

ROOT = Path(__file__).resolve().parents[2]
_COUNTED = ("wgmma.mma", "tcgen05.mma", "mma.sync", "cp.async.")


@dataclass(frozen=True)
class Compiled:
    """One variant for one architecture."""

    shared_bytes: int
    registers: int
    spilled_bytes: int
    """Stores and loads to local memory, as ptxas counts them."""
    instructions: dict[str, int]
    """How often the PTX has each of `_COUNTED`."""


def compile_variants(variants: list[Variant], arch: int) -> list[Compiled]:
    """Compiles variants for sm_`arch`, or takes them from Triton's cache."""
    run = subprocess.run(
        [sys.executable, "-m", __name__, str(arch)],
        cwd=ROOT,
        # Without fused multiply-adds Triton would compile other code than on a device.
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        input=pickle.dumps(variants),
        capture_output=True,
    )
    assert not run.returncode, run.stderr.decode()[-3000:]
    return [Compiled(**json.loads(line)) for line in run.stdout.splitlines()]


def _compile(variant: Variant, arch: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=getattr(import_module(variant.module), variant.kernel),
        signature=variant.signature,
        constexprs=variant.constants,
        attrs=variant.attributes,
    )
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target=target, options=variant.options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _ptxas(ptx, arch)
    counts = {instruction: ptx.count(instruction) for instruction in _COUNTED}
    return Compiled(compiled.metadata.shared, registers, spilled, counts)


def _ptxas(ptx: str, arch: int) -> tuple[int, int]:
    """Returns registers of a thread and bytes spilled."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target, "no target in the PTX"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        log = subprocess.run(
            [
                get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", source, "-o",
                Path(folder) / "kernel.cubin",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stderr  # fmt: skip
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    assert registers and spills, log
    return int(registers[1]), sum(map(int, spills))


def main(arch: int) -> None:
    for variant in pickle.load(sys.stdin.buffer):
        try:
            compiled = _compile(variant, arch)
        except Exception as error:
            raise RuntimeError(f"{variant.kernel} does not compile for sm_{arch}") from error
        print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
