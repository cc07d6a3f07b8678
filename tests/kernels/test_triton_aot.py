# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation for devices that are not here: no spills, the right instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# What changes from step to step: numbers, and pointers into the middle of a buffer.
STEP_ARGUMENTS = {
    "num_splits", "num_parts", "parts_split", "plan_stride", "words_stride", "table_stride",
    "lse_split", "paths_stride", "emitted_stride", "num_depths", "width", "max_width", "num_nodes",
    "budgets", "depths", "context_lens", "req_indices", "prefix_lse_head", "num_rows",
}  # fmt: skip
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", MATRIX_INSTRUCTION)
def test_kernels_compile_without_spills(arch: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_aot", str(arch)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(kernels) == {80: 20, 90: 24, 100: 22}[arch]
    for kernel in kernels:
        assert kernel["spilled_bytes"] == 0, kernel
        assert 0 < kernel["registers"] <= 255, kernel
        # A variant for each of their values would compile while serving.
        assert not STEP_ARGUMENTS & {*kernel["specialised"]}, kernel
    for kernel in kernels[:2]:
        assert kernel["instructions"][MATRIX_INSTRUCTION[arch]] > 0, kernel
        assert kernel["instructions"]["cp.async."] > 0, kernel
