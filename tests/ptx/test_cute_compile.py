# SPDX-License-Identifier: Apache-2.0
"""Every shipped variant compiles for sm_90a, to the instructions it is meant to use."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("triton")

import triton

from tests.ptx.cute_machine import compiled
from vllm_specplug.kernels.cute.config import (
    SHARED_LIMIT,
    SHARED_RESERVED,
    SHARED_TOTAL,
    ForwardConfig,
    all_configs,
)
from vllm_specplug.kernels.cute.launch_params import COMBINE_PARAMETERS, FORWARD_PARAMETERS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Per multiprocessor of compute capability 9.0. Registers are allocated in units per thread.
REGISTERS, THREADS, REGISTER_UNIT = 65536, 2048, 8


def marks(config) -> list[pytest.MarkDecorator]:
    # Beside the emulated tests of the head size, which need the same listings.
    beside = pytest.mark.xdist_group(f"cute{config.head_dim}")
    usual = config.dtype == "bfloat16" and config.head_dim == 64
    if isinstance(config, ForwardConfig):
        usual = usual and (config.warpgroups, config.box) in ((1, 64), (2, 16))
        usual = usual and not config.window
    return [beside, pytest.mark.smoke] if usual else [beside]


CONFIGS = [pytest.param(config, id=config.name, marks=marks(config)) for config in all_configs()]


def listing(cubin: Path, *options: str) -> str:
    command = [str(TOOLS / "cuobjdump"), *options, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(cubin: Path) -> tuple[int, int]:
    """Registers per thread, and bytes of stack."""
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", listing(cubin, "-res-usage"))
    return int(usage[0]), int(usage[1])


@pytest.mark.parametrize("config", CONFIGS)
def test_cubin(config, tmp_path):
    kernel = compiled(config)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.cubin)
    sass = listing(path, "-sass")
    assert "sm_90a" in sass and kernel.entry in sass

    registers, stack = resources(path)
    assert stack == 0 and "LDL" not in sass and "STL" not in sass, "spilled registers"
    blocks = min(
        REGISTERS // (-(-registers // REGISTER_UNIT) * REGISTER_UNIT * config.threads),
        SHARED_TOTAL // (config.shared_bytes + SHARED_RESERVED),
        THREADS // config.threads,
    )
    assert blocks >= getattr(config, "ctas_per_sm", 1), "the blocks do not fit"
    assert config.shared_bytes <= SHARED_LIMIT

    # A driver of CUDA 13.0 need not take machine code of a later toolkit: then the PTX serves.
    listed = tmp_path / "kernel.ptx"
    listed.write_text(kernel.ptx)
    older = [str(TOOLS / "ptxas"), "-v", "-arch=sm_90a", str(listed), "-o", str(tmp_path / "x")]
    made = subprocess.run(older, check=True, capture_output=True, text=True)
    assert "0 bytes stack frame, 0 bytes spill stores" in made.stderr

    named = FORWARD_PARAMETERS if isinstance(config, ForwardConfig) else COMBINE_PARAMETERS
    scalars = [size for size in kernel.param_bytes if size in (4, 8)]
    assert scalars == [8 if kind in ("address", "stride") else 4 for _, kind in named]

    if isinstance(config, ForwardConfig):
        # The assembler waits for each product by itself where it finds registers in their way.
        waits = len(re.findall(r"wgmma\.wait_group", kernel.ptx))
        assert sass.count("WARPGROUP.DEPBAR") == waits, "products run one by one"
        # What is peeled from the loop of a producer's warpgroups are a product of each kind.
        times = 1 + config.specialised
        steps = (times * config.head_dim // 16, times * 4)
        scores = re.findall(r"HGMMA\.64x64x16\.F32", sass)
        outputs = re.findall(rf"HGMMA\.64x{config.head_dim}x16\.F32", sass)
        if config.head_dim == 64:
            assert len(scores) == sum(steps)
        else:
            assert (len(scores), len(outputs)) == steps
        assert "LDGSTS" in sass  # the query and the tail, whatever brings full tiles
        assert "UTMALDG.4D" in sass
        assert kernel.param_bytes.count(128) == 2
