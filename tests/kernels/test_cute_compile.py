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

from tests.kernels.cute_machine import compiled
from vllm_specplug.kernels.cute.config import SHARED_LIMIT, ForwardConfig, all_configs
from vllm_specplug.kernels.cute.launch_params import COMBINE_PARAMETERS, FORWARD_PARAMETERS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS = 65536  # of a multiprocessor
REGISTER_UNIT = 8  # a thread's registers are given out in these


def marks(config) -> list[pytest.MarkDecorator]:
    # Beside the emulated tests of the head size, which need the same listings.
    beside = pytest.mark.xdist_group(f"cute{config.head_dim}")
    common = config.head_dim != 96 and config.dtype == "bfloat16"
    plain = not isinstance(config, ForwardConfig) or not config.placed and not config.soft_cap
    return [beside] if plain or common else [beside, pytest.mark.full]


# Those that are compiled where they are asked for, in the shape with the most registers.
FEATURES = [
    ForwardConfig(128, "bfloat16", 3, tma, **features)
    for tma in (False, True)
    for features in (
        {"soft_cap": True},
        {"alibi": True},
        {"window": True, "soft_cap": True},
        {"window": True, "soft_cap": True, "alibi": True},
    )
]
CONFIGS = [
    pytest.param(config, id=config.name, marks=marks(config))
    for config in [*all_configs(), *FEATURES]
]


def listing(cubin: Path, *options: str) -> str:
    command = [str(TOOLS / "cuobjdump"), *options, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("config", CONFIGS)
def test_cubin(config, tmp_path):
    kernel = compiled(config)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.cubin)
    sass = listing(path, "-sass")
    assert "sm_90a" in sass and kernel.entry in sass

    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", listing(path, "-res-usage"))
    registers, stack = map(int, usage)
    assert stack == 0 and "LDL" not in sass and "STL" not in sass, "registers are spilled"
    rounded = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    blocks = getattr(config, "blocks_per_multiprocessor", 1)
    assert rounded * config.threads * blocks <= REGISTERS, "the blocks do not fit"
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
        steps = (config.head_dim // 16, 4)
        scores = re.findall(r"HGMMA\.64x64x16\.F32", sass)
        outputs = re.findall(rf"HGMMA\.64x{config.head_dim}x16\.F32", sass)
        if config.head_dim == 64:
            assert len(scores) == sum(steps)
        else:
            assert (len(scores), len(outputs)) == steps
        assert "LDGSTS" in sass  # the query and the tail, whatever brings full tiles
        assert ("UTMALDG.4D" in sass) == config.tma
        assert kernel.param_bytes.count(128) == 2 * config.tma
