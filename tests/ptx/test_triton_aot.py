# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation for devices that are not here: no spills, the right instructions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

# What changes from step to step: numbers, and pointers into the middle of a buffer.
STEP_ARGUMENTS = {
    "forced_parts", "resident_ctas", "extra", "part_rows", "plan_stride", "words_stride",
    "table_stride", "paths_stride", "emitted_stride", "num_depths", "width", "max_width",
    "num_nodes", "budgets", "depths", "context_lens", "req_indices", "prefix_lse_head", "num_rows",
    "stride", "num_pieces", "count", "longest", "num_branches", "length", "num_ranks", "num_trees",
    "row_stride_a", "row_stride_b", "key_row", "value_row", "columns", "columns_stride", "lens",
    "part_chunks", "num_parts", "num_paths", "num_lookup", "num_tokens", "room", "num_reqs",
    "last_stride", "limits",
}  # fmt: skip
# Addresses of results, kept from before the loop over the context to behind that over the tree.
SPILLS = {
    (90, "tree_attn rows 256 dim 256 page 16 bf16"): 144,
    (90, "tree_attn rows 256 dim 256 page 16 bf16 window soft cap"): 280,
}
# Tiles of 16 rows take `mma.sync` on sm_90 too.
LARGE_TILES = re.compile(r"rows (256|64) dim 128 page 16 (bf|fp)16( dense)?$")
COUNTS = {80: 62, 90: 68, 100: 66}
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}


def compiled(arch: int) -> list[dict[str, Any]]:
    """`triton_aot.Compiled` of each kernel for sm_`arch`, from Triton's cache or in minutes."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.ptx.triton_aot", str(arch)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
    )
    assert not run.returncode, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_without_spills(arch: int) -> None:
    kernels = compiled(arch)
    assert len(kernels) == COUNTS[arch]
    for kernel in kernels:
        assert kernel["spilled_bytes"] <= SPILLS.get((arch, kernel["name"]), 0), kernel
        assert 0 < kernel["registers"] <= 255, kernel
        # A variant for each of their values would compile while serving.
        assert not STEP_ARGUMENTS & {*kernel["specialised"]}, kernel
    halves = [k for k in kernels if LARGE_TILES.search(k["name"])]
    singles = [k for k in kernels if " fp32" in k["name"]]
    assert (len(halves), len(singles)) == (4, 7)
    for kernel in halves + singles:
        made = {k: n for k, n in kernel["instructions"].items() if "mma" in k and n}
        # Matrix products of float32 would round its factors to those of TF32.
        assert (MATRIX_INSTRUCTION[arch] in made) == (kernel in halves), kernel
        assert bool(made) == (kernel in halves), kernel
        assert kernel["instructions"]["cp.async."] > 0, kernel
