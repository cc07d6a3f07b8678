# SPDX-License-Identifier: Apache-2.0
"""Every shipped variant compiles for sm_90a, to the instructions it is meant to use."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("triton")

import triton

from scripts import cute_resources
from scripts.cute_resources import on_demand_configs
from scripts.sass import difference
from tests.ptx.cute_machine import compiled
from vllm_specplug.kernels.cute.config import (
    BOXES,
    SHARED_LIMIT,
    ForwardConfig,
    all_configs,
)
from vllm_specplug.kernels.cute.launch_params import COMBINE_PARAMETERS, FORWARD_PARAMETERS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def marks(config) -> list[pytest.MarkDecorator]:
    # Beside the emulated tests of the head size, which need the same listings.
    beside = pytest.mark.xdist_group(f"cute{config.head_dim}")
    usual = config.dtype == "bfloat16" and config.head_dim == 64
    if isinstance(config, ForwardConfig):
        usual = usual and (config.warpgroups, config.box) in ((3, 64), (2, 16))
        usual = usual and not config.window + config.soft_cap + config.alibi
    return [beside, pytest.mark.smoke] if usual else [beside]


# Beside those with rows in the tables: larger boxes in the shape with the most registers.
FEATURES = [
    ForwardConfig(128, "bfloat16", 3, BOXES[1], **features)
    for features in (
        {"soft_cap": True},
        {"alibi": True},
        {"window": True, "soft_cap": True},
        {"window": True, "soft_cap": True, "alibi": True},
    )
]
CP_ASYNC = [ForwardConfig(128, "bfloat16", warpgroups, 0) for warpgroups in (1, 3)]
CONFIGS = [
    pytest.param(config, id=config.name, marks=marks(config))
    for config in [*all_configs(), *on_demand_configs(), *FEATURES, *CP_ASYNC]
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

    taken = cute_resources.resources(kernel.cubin, config)
    assert taken.stack_bytes == 0 and "LDL" not in sass and "STL" not in sass, "spilled registers"
    assert taken.blocks >= getattr(config, "ctas_per_sm", 1), "the blocks do not fit"
    page = cute_resources.PAGE.read_text()
    compiler, recorded = cute_resources.recorded(page)
    on_demand = cute_resources.recorded_on_demand(page)
    recorded |= {name: asked for name, (asked, _) in on_demand.items()}
    same = compiler == version("nvidia-cutlass-dsl")
    again = "run: python -m scripts.cute_resources --write"
    has_rows = config in [*all_configs(), *on_demand_configs()]
    if has_rows:
        then = recorded[config.name]
        found = cute_resources.difference(taken, then, same_compiler=same)
        assert found is None, f"{found}; {again}"
    if has_rows and isinstance(config, ForwardConfig):
        line = cute_resources.recorded_loop(page, config) or on_demand[config.name][1]
        now = cute_resources.loop(kernel.cubin, config)
        found = difference(now, line, same_compiler=same)
        assert found is None, f"{found}; {again}"
        if config.specialised and config in all_configs():
            producer = cute_resources.recorded_producer(page, config)
            found = cute_resources.producer(kernel.cubin, config)
            assert producer == found or not same, found
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
        assert ("UTMALDG.4D" in sass) == bool(config.box)
        assert kernel.param_bytes.count(128) == 2 * bool(config.box)


def test_the_table_of_resources_notices_more_of_each():
    then = cute_resources.Resources(168, 100_000, 0, 2)
    for same in (True, False):
        assert cute_resources.difference(then, then, same_compiler=same) is None
    for change in ({"registers": 220}, {"stack_bytes": 8}, {"blocks": 1}):
        now = then._replace(**change)
        assert cute_resources.difference(now, then, same_compiler=False)
    assert cute_resources.difference(then._replace(registers=170), then, same_compiler=True)
    config = ForwardConfig(128, "bfloat16", 1, 64)
    both = {config.name: then, config.name.replace("bfloat16", "float16"): then}
    page = f"<!-- cute resources -->\n{cute_resources.table(both)}\n<!-- /cute resources -->"
    assert cute_resources.recorded(page)[1] == both
