# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation for devices that are not here: no spills, the right instructions."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from scripts import resource_table, sass, source_digest

pytest.importorskip("triton")

# What changes from step to step: numbers, and pointers into the middle of a buffer.
STEP_ARGUMENTS = {
    "forced", "places", "extra", "part_rows", "plan_stride", "words_stride", "table_stride",
    "paths_stride", "emitted_stride", "num_depths", "width", "max_width", "num_nodes",
    "budgets", "depths", "context_lens", "req_indices", "prefix_lse_head", "num_rows", "stride",
    "num_pieces", "count", "longest", "num_branches", "length", "num_ranks",
    "num_trees", "row_stride_a", "row_stride_b", "key_row", "value_row",
    "columns", "columns_stride", "lens", "part_chunks", "num_parts",
}  # fmt: skip
# Addresses of results, kept from before the loop over the context to behind that over the tree.
SPILLS = {
    (90, "tree_attn rows 256 dim 256 page 16 bf16"): 144,
    (90, "tree_attn rows 256 dim 256 page 16 bf16 window soft cap"): 280,
}
# Tiles of 16 rows take `mma.sync` on sm_90 too.
LARGE_TILES = re.compile(r"rows (256|64) dim 128 page 16 (bf|fp)16( dense)?$")
COUNTS = {80: 53, 90: 58, 100: 56}
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}


def test_the_table_was_made_from_these_sources() -> None:
    made = source_digest.recorded(resource_table.PAGE.read_text())
    assert made == resource_table.digest(), "run: python -m scripts.resource_table --write"
    names = {path.name for path in resource_table.sources()}
    assert {"tree_attn_triton_kernel.py", "delta_tree_triton.py", "triton_aot.py"} <= names


def test_the_table_tells_of_no_spills() -> None:
    """Which `test_kernels_compile_without_spills` finds again with the compiler of the day."""
    _, recorded = resource_table.recorded(resource_table.PAGE.read_text())
    assert {arch: len(kernels) for arch, kernels in recorded.items()} == COUNTS
    for arch, kernels in recorded.items():
        for name, (registers, _, spilled) in kernels.items():
            assert spilled <= SPILLS.get((arch, name), 0) and 0 < registers <= 255, name


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_without_spills(arch: int) -> None:
    kernels = resource_table.compiled(arch)
    assert len(kernels) == COUNTS[arch]
    for kernel in kernels:
        assert kernel["spilled_bytes"] <= SPILLS.get((arch, kernel["name"]), 0), kernel
        assert 0 < kernel["registers"] <= 255, kernel
        # A variant for each of their values would compile while serving.
        assert not STEP_ARGUMENTS & {*kernel["specialised"]}, kernel
    halves = [k for k in kernels if LARGE_TILES.search(k["name"])]
    singles = [k for k in kernels if " fp32" in k["name"]]
    assert (len(halves), len(singles)) == (4, 6)
    for kernel in halves + singles:
        made = {k: n for k, n in kernel["instructions"].items() if "mma" in k and n}
        # Matrix products of float32 would round its factors to those of TF32.
        assert (MATRIX_INSTRUCTION[arch] in made) == (kernel in halves), kernel
        assert bool(made) == (kernel in halves), kernel
        assert kernel["instructions"]["cp.async."] > 0, kernel
    release, recorded = resource_table.recorded(resource_table.PAGE.read_text())
    changed = resource_table.differences(
        resource_table.resources(kernels),
        recorded[arch],
        same_compiler=release == version("triton"),
    )
    assert not changed, (changed, "run: python -m scripts.resource_table --write")
    if arch == 90:
        loops = resource_table.loops(kernels)
        then = sass.recorded(resource_table.PAGE.read_text(), resource_table.LOOPS)
        assert loops.keys() == then.keys()
        same = release == version("triton")
        changed = [
            f"{name}: {found}"
            for name in loops
            if (found := sass.difference(loops[name], then[name], same_compiler=same))
        ]
        assert not changed, (changed, "run: python -m scripts.resource_table --write")


def test_kernels_that_take_more_than_recorded_are_told() -> None:
    """By the compiler of the record any difference counts, by another what is out of proportion."""
    by_arch = {80: {"a": (100, 4096, 0), "b": (32, 0, 16)}, 90: {"a": (128, 8192, 0)}}
    block = f"<!-- resources -->\n{resource_table.table(by_arch)}\n<!-- /resources -->"
    release, recorded = resource_table.recorded(f"text\n{block}\nmore")
    assert (release, recorded) == (version("triton"), by_arch)
    for now, same, other in (
        ((100, 4096, 0), 0, 0),
        ((101, 4096, 0), 1, 0),
        ((90, 2048, 0), 1, 0),
        ((134, 4096, 0), 1, 1),
        ((100, 8192, 0), 1, 1),
        ((100, 4096, 4), 1, 1),
    ):
        found = {"a": now, "b": (32, 0, 16)}
        for same_compiler, count in ((True, same), (False, other)):
            got = resource_table.differences(found, by_arch[80], same_compiler=same_compiler)
            assert len(got) == count, (now, got)
    assert len(resource_table.differences({}, by_arch[90], same_compiler=False)) == 1
