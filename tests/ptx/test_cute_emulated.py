# SPDX-License-Identifier: Apache-2.0
"""The CuTe kernels' own PTX, stepped on the CPU, against an oracle without masks or pages.

What a launch plans, what the compiler made of the kernel, and what the kernel reads and writes are
all the real thing; see `ptx_machine` for what is not. Blocks are stepped one by one, so shapes are
small: a tile costs some tens of milliseconds.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")

from tests.kernels.spoilt_rows import check_device, device_trees
from tests.ptx import cute_machine
from tests.ptx.cute_machine import (
    BF16,
    EARLY,
    FP16,
    LATE,
    MachineSuite,
    MachineTrees,
    compiled,
    ran,
    variant,
)
from vllm_specplug.kernels import isolate_nonfinite

# Nodes of a tree that the scheme serves.
SCHEMES = {"basic": 15, "specialised": 40}
SYNCHRONISATION = [
    "bar.sync", "fence.proxy", "fence.mbarrier_init", "mbarrier.init", "mbarrier.arrive",
    "cp.async.commit_group", "cp.async.wait_group", "wgmma.fence", "wgmma.commit_group",
    "wgmma.wait_group",
]  # fmt: skip


@variant(64)
class TestTrees(MachineSuite):
    @pytest.mark.smoke
    def test_largest_tree(self) -> None:
        super().test_largest_tree()


@variant(64)
def test_more_tiles_than_stages():
    counts = MachineTrees([(600, 5)], dtype=BF16, head_dim=64, group=4).check(timing=EARLY)
    assert ran(counts, "wgmma.mma_async") == 10 * (4 + 4)  # tiles of two products in four steps


@variant(64)
def test_scores_that_outgrow_their_reference_rescale_the_output():
    calm, wild = (MachineTrees([(400, 20)], dtype=BF16, head_dim=64, group=3) for _ in range(2))
    wild.query *= 30
    corrections = [ran(trees.check(), "ex2.approx") for trees in (calm, wild)]
    assert corrections[0] < corrections[1]


@variant(128)
@pytest.mark.parametrize("timing", [LATE, EARLY])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_full_tiles_by_the_copy_engine(page, timing):
    specs = [(4 * 64 + 3, 9), (40, 0)]
    counts = MachineTrees(specs, dtype=BF16, head_dim=128, page=page).check(timing=timing)
    # of 5 + 1 tiles, 4 are full: K and V in two bands each, in boxes of 16 slots or of a tile
    boxes = 1 if page >= 64 else 4
    assert ran(counts, "cp.async.bulk.tensor") == 4 * 2 * 2 * boxes


@variant(128)
def test_heads_before_tokens_in_memory():
    trees = MachineTrees([(150, 9)], dtype=BF16, head_dim=128, kv_heads=2, page=64)
    # [num_blocks, Hkv, page, 2 * Dh] in this order in memory as well
    cache = trees.cache.contiguous()
    trees.key_cache, trees.value_cache = cache.transpose(1, 2).split(128, dim=-1)
    trees.check(timing=EARLY)


@variant(128)
def test_the_ring_of_the_copy_engine_turns():
    specs = [(64 * 8 + 1, 70)]
    MachineTrees(specs, dtype=FP16, head_dim=128, group=1, page=64).check(timing=EARLY)


@variant(96)
@pytest.mark.parametrize("page", [16, 64])
def test_head_size_of_narrower_bands(page):
    specs = [(130, 33), (0, 2)]
    trees = MachineTrees(specs, dtype=FP16, head_dim=96, group=3, kv_heads=2, page=page)
    trees.check(timing=EARLY)


@variant(96)
@pytest.mark.parametrize("splits", [2, 3])
def test_splits_are_merged_and_short_contexts_leave_some_empty(splits):
    specs = [(330, 5), (3, 2), (0, 9), (190, 0)]
    counts = MachineTrees(specs, dtype=BF16, head_dim=96).check(splits=splits, skipped=2)
    assert ran(counts, "ex2.approx")


@variant(96)
def test_split_dense_tails():
    specs = [(200, 70), (128, 3)]
    MachineTrees(specs, dtype=FP16, head_dim=96, dense=True, group=1).check(splits=2)


@variant(64)
def test_words_of_a_damaged_tree_end():
    """Rows that name themselves, a later row, or each other."""
    trees = MachineTrees([(5, 8)], dtype=BF16, head_dim=64)
    trees.parent_rows = lambda: torch.tensor([1, 0, 2, 7, 6, 5, -9, 300, 8], dtype=torch.int32)
    # Every row still attends itself.
    assert trees.answer().isfinite().all()


@variant(64)
@pytest.mark.parametrize("splits", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_what_is_not_finite_reaches_those_who_attend_it(splits):
    problem = device_trees(MachineTrees, kv_heads=2, dtype=FP16, head_dim=64)
    check_device(problem, isolate_nonfinite, lambda: problem.answer(splits=splits))


@variant(64)
@pytest.mark.parametrize(
    ("nodes", "kind"),
    [*itertools.product(SCHEMES.values(), SYNCHRONISATION), (40, "bar.warp.sync")],
)
def test_missing_synchronisation_is_noticed(nodes, kind, monkeypatch):
    trees = MachineTrees([(64 * 11 + 5, nodes)], dtype=BF16, head_dim=64, group=4, page=64)
    trees.check()
    line = re.compile(rf"^[ \t]*(?:@!?%\w+[ \t]+)?{re.escape(kind)}\b[^;\n]*;", re.MULTILINE)

    def damaged(config):
        kernel = compiled(config)
        ptx, count = line.subn("", kernel.ptx)
        # Not by an AssertionError, which is waited for.
        return replace(kernel, ptx=ptx) if count else pytest.fail(f"there is no {kind}")

    monkeypatch.setattr(cute_machine, "compiled", damaged)
    with pytest.raises(
        (AssertionError, RuntimeError), match="without|nobody|not fenced|not waited for|deadlock"
    ):
        trees.check()
