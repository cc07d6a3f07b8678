# SPDX-License-Identifier: Apache-2.0
"""The CuTe kernel's scheme with a producer, its own PTX stepped on the CPU: a warp that loads, and
warpgroups that run apart as far as the barriers of the stages let them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from tests.ptx.cute_machine import BF16, EARLY, FP16, LATE, MachineSuite, MachineTrees, ran, variant
from vllm_specplug.kernels import AttnFeatures
from vllm_specplug.kernels.cute.config import CP_ASYNC_LAG
from vllm_specplug.kernels.cute.launch import warpgroups_for

TIMINGS = pytest.mark.parametrize("timing", [LATE, EARLY])


@variant(64)
@TIMINGS
@pytest.mark.parametrize("page", [16, pytest.param(64, marks=pytest.mark.smoke), 128])
def test_the_ring_turns(page, timing):
    trees = MachineTrees([(64 * 11 + 5, 15)], dtype=BF16, head_dim=64, group=8, page=page)
    counts = trees.check(timing=timing)
    # 12 tiles of two warpgroups in four steps each, of which the last is masked
    assert ran(counts, "wgmma.mma_async") == 12 * 2 * (4 + 4)
    assert ran(counts, "cp.async.bulk.tensor") == 11 * 2 * (1 if page >= 64 else 4)
    # Each warpgroup releases all tiles but the last; the producer tells of the masked one.
    assert ran(counts, "mbarrier.arrive.shared") == 11 * 2 + 1
    # No barrier of a tile: masks, and the query.
    assert ran(counts, "bar.sync") <= 2 * 4 + 1


@variant(128)
@TIMINGS
def test_shapes_of_an_8b_model(timing):
    specs = [(64 * 6 + 9, 31), (20, 63)]
    MachineTrees(specs, dtype=BF16, head_dim=128).check(timing=timing)


@variant(96)
@pytest.mark.parametrize("page", [16, 64])
def test_head_size_of_narrower_bands(page):
    trees = MachineTrees([(470, 33), (0, 40)], dtype=FP16, head_dim=96, group=3, page=page)
    trees.check(timing=EARLY)


@variant(64)
class TestTrees(MachineSuite):
    narrow = wide = {"group": 17}


@variant(64)
@pytest.mark.parametrize("nodes", [64, 127, 128])
def test_the_last_block_may_have_a_warpgroup_less(nodes):
    """That one waits for nobody, and nobody for it."""
    trees = MachineTrees([(70, nodes)], dtype=FP16, head_dim=64, group=1)
    trees.check(timing=EARLY)


@variant(64)
@pytest.mark.parametrize("mask", ["tree", "causal", "full"])
def test_dense_tails_of_more_tiles_than_the_producer_lags(mask):
    specs = [(0, 15), (40, 64 * (CP_ASYNC_LAG + 1)), (64, 90)]
    trees = MachineTrees(specs, dtype=BF16, head_dim=64, group=1, dense=True, mask=mask)
    trees.check(timing=EARLY)


@variant(64)
@TIMINGS
def test_parts_of_skewed_batches(timing):
    """What is long is cut, what is short is not; scaled down, the whole is below."""
    specs = [(64 * 20 + 3, 8), *[(60 + n, 8) for n in range(3)]]
    trees = MachineTrees(specs, dtype=BF16, head_dim=64, group=10)
    counts = trees.check(splits=None, timing=timing)
    assert ran(counts, "ex2.approx") and ran(counts, "lg2.approx"), "nothing was merged"


@variant(64)
@TIMINGS
def test_parts_of_several_row_blocks(timing):
    """Trees of three row blocks, two and one beside a long context of two; a tenth of 31 x 1k."""
    specs = [(64 * 14 + 3, 16), (90, 30), *[(100 + n, 2 + n) for n in range(3)], (0, 12)]
    trees = MachineTrees(specs, dtype=BF16, head_dim=64, group=10)
    counts = trees.check(splits=None, timing=timing, skipped=2)
    assert ran(counts, "lg2.approx"), "nothing was cut"


@variant(64)
@TIMINGS
def test_31_contexts_of_1k_beside_one_of_100k(timing):
    specs = [(100_000, 8), *[(1000 + n, 8) for n in range(31)]]
    trees = MachineTrees(specs, dtype=BF16, head_dim=64, group=10)
    trees.check(splits=None, timing=timing)


@variant(64)
@pytest.mark.parametrize(
    "features",
    [
        pytest.param(AttnFeatures(window=200), id="window"),
        pytest.param(AttnFeatures(window=90, sinks=torch.randn(8)), id="all"),
    ],
)
@TIMINGS
def test_features(features, timing):
    """A window begins within a tile, which comes by small copies before those of the engine."""
    specs = [(64 * 9 + 30, 15), (39, 9)]
    trees = MachineTrees(specs, dtype=FP16, head_dim=64, group=8, features=features)
    trees.check(timing=timing)


@variant(64)
def test_scores_that_outgrow_their_reference_rescale_what_is_under_way():
    trees = MachineTrees([(500, 20)], dtype=FP16, head_dim=64, group=4)
    trees.query *= 30
    trees.check(timing=EARLY)


def test_small_trees_take_one_warpgroup():
    assert [warpgroups_for(n) for n in (64, 65, 256, 1024)] == [1, 2, 2, 2]
