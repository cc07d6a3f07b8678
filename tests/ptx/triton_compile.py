# SPDX-License-Identifier: Apache-2.0
"""Compiles one Triton kernel for a GPU that need not be there, and reads what ptxas says."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    name: str
    shared_memory: int
    registers: int
    spilled_bytes: int
    """Stores and loads to local memory, as ptxas counts them."""
    instructions: dict[str, int]
    """How often the PTX has some that matter."""
    specialised: list[str]
    """Run-time arguments whose value or alignment makes a variant of its own."""


_COUNTED = ("wgmma.mma", "tcgen05.mma", "mma.sync", "cp.async.")


def compile_kernel(
    name: str,
    kernel: Any,
    arch: int,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    aligned: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 3,
) -> Compiled:
    """Compiles `kernel` for sm_`arch`.

    Args:
        types: Triton type of each run-time argument, e.g. "*bf16" or "i32".
        constants: compile-time arguments, also run-time ones that are fixed here.
        aligned: run-time arguments that are multiples of 16, as pointers and strides usually are.
    """
    names = list(kernel.arg_names)
    unknown = (set(types) | set(constants)) ^ set(names)
    assert not unknown, f"arguments without a type, or unknown: {sorted(unknown)}"
    signature = {n: types.get(n, "constexpr") for n in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    ptx = compiled.asm["ptx"]
    registers, spilled = _ptxas(ptx, arch)
    counts = {instruction: ptx.count(instruction) for instruction in _COUNTED}
    specialised = [
        p.name
        for p in kernel.params
        if not p.is_constexpr
        and not p.do_not_specialize
        and not (types.get(p.name, "").startswith("*") and p.do_not_specialize_on_alignment)
    ]
    return Compiled(name, compiled.metadata.shared, registers, spilled, counts, specialised)


def _ptxas(ptx: str, arch: int) -> tuple[int, int]:
    """Registers a thread and bytes spilled."""
    tool = get_ptxas(arch).path
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target, "no target in the PTX"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        log = subprocess.run(
            [tool, "-v", f"--gpu-name={target[1]}", source, "-o", Path(folder) / "kernel.cubin"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    assert registers and spills, log
    return int(registers[1]), sum(map(int, spills))
