# SPDX-License-Identifier: Apache-2.0
"""The CuTe kernels' own PTX, stepped on the CPU, against an oracle without masks or pages.

What a launch plans, what the compiler made of the kernel, and what the kernel reads and writes are
all the real thing; see `ptx_machine` for what is not. Blocks are stepped one by one, so shapes are
small: a tile costs some tens of milliseconds.

Trees of at most 64 packed rows take the basic scheme, larger ones that with a producer: a warp that
loads, and warpgroups that run apart as far as the barriers of the stages let them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from tests.kernels.attention_suite import FEATURES, DenseSuite, FeatureSuite, Specs, per_head
from tests.kernels.spoilt_rows import TREES, check_spoilt
from tests.ptx import cute_machine
from tests.ptx.cute_machine import BF16, EARLY, FP16, LATE, MachineTrees, compiled, ran
from vllm_specplug.kernels import AttnFeatures, isolate_nonfinite
from vllm_specplug.kernels.cute.config import CP_ASYNC_LAG
from vllm_specplug.kernels.cute.launch import warpgroups_for

TIMINGS = pytest.mark.parametrize("timing", [LATE, EARLY], ids=["late", "early"])
# Nodes of a tree that the scheme serves.
SCHEMES = pytest.mark.parametrize("nodes", [15, 40], ids=["basic", "specialised"])


def variant(head_dim: int):
    """One process compiles a head size's variants, once."""
    return pytest.mark.xdist_group(f"cute{head_dim}")


class Suite(DenseSuite):
    """With copies and products as late as allowed and as early as possible."""

    wide: dict[str, Any] = {}

    @pytest.fixture(autouse=True, params=[LATE, EARLY], ids=["late", "early"])
    def _timing(self, request: pytest.FixtureRequest) -> None:
        self.timing = request.param

    def problem(self, specs: Specs, **options: Any) -> MachineTrees:
        made = MachineTrees(specs, **{"dtype": BF16, "head_dim": 64, **self.wide, **options})
        made.timing = self.timing
        return made


@variant(64)
class TestBasic(Suite):
    @pytest.mark.smoke
    def test_largest_tree(self) -> None:
        super().test_largest_tree()


@variant(64)
class TestSpecialised(Suite):
    narrow = wide = {"group": 17}


@variant(64)
class TestFeatures(FeatureSuite):
    controlled = AttnFeatures(window=40, sinks=per_head())

    def problem(self, features: AttnFeatures, specs: Specs, **options: Any) -> MachineTrees:
        if features.soft_cap or features.alibi_slopes is not None:
            pytest.skip("the Triton kernel serves such layers")
        sizes = {"dtype": FP16, "head_dim": 64, "group": 4}
        return MachineTrees(specs, features=features, **{**sizes, **options})


def test_small_trees_take_one_warpgroup():
    assert [warpgroups_for(n) for n in (64, 65, 256, 1024)] == [1, 2, 2, 2]


@variant(64)
@SCHEMES
def test_scores_that_outgrow_their_reference_rescale_the_output(nodes):
    calm, wild = (MachineTrees([(500, nodes)], dtype=BF16, head_dim=64, group=4) for _ in range(2))
    wild.query *= 30
    corrections = [ran(trees.check(timing=EARLY), "ex2.approx") for trees in (calm, wild)]
    assert corrections[0] < corrections[1]


@variant(128)
@TIMINGS
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


@variant(64)
@TIMINGS
@pytest.mark.parametrize("page", [16, pytest.param(64, marks=pytest.mark.smoke), 128])
def test_the_ring_turns(page, timing):
    trees = MachineTrees([(64 * 11 + 5, 15)], dtype=BF16, head_dim=64, group=8, page=page)
    counts = trees.check(timing=timing)
    # 12 tiles of two warpgroups in four steps each, of which the last is masked
    assert ran(counts, "wgmma.mma_async") == 12 * 2 * (4 + 4)
    assert ran(counts, "cp.async.bulk.tensor") == 11 * 2 * (1 if page >= 64 else 4)
    # Each warpgroup releases all tiles but the last; the producer signals the masked one.
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
@pytest.mark.parametrize("splits", [1, 3])
def test_head_size_of_narrower_bands(page, splits):
    trees = MachineTrees([(470, 33), (0, 40)], dtype=FP16, head_dim=96, group=3, page=page)
    trees.check(timing=EARLY, splits=splits)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_features_of_other_head_sizes(head_dim: int) -> None:
    heads = {"head_dim": head_dim, "dtype": BF16, "page": 64, "kv_heads": 2, "group": 2}
    MachineTrees([(150, 30)], features=FEATURES["window and sinks"], **heads).check()


@variant(64)
@pytest.mark.parametrize("nodes", [64, 127, 128])
def test_the_last_block_may_have_a_warpgroup_less(nodes):
    """A block with one warpgroup skips the barrier between warpgroups."""
    trees = MachineTrees([(70, nodes)], dtype=FP16, head_dim=64, group=1)
    trees.check(timing=EARLY)


@variant(64)
@pytest.mark.parametrize("mask", ["tree", "causal", "full"])
def test_dense_tails_of_more_tiles_than_the_producer_lags(mask):
    specs = [(0, 15), (40, 64 * (CP_ASYNC_LAG + 1)), (64, 90)]
    trees = MachineTrees(specs, dtype=BF16, head_dim=64, group=1, dense=True, mask=mask)
    trees.check(timing=EARLY)


@variant(96)
def test_split_dense_tails():
    specs = [(200, 70), (128, 3)]
    MachineTrees(specs, dtype=FP16, head_dim=96, dense=True, group=1).check(splits=2)


# What is long is cut, what is short is not; and trees of three row blocks, two and one beside a
# long context of two.
SKEWED: list[Specs] = [
    [(64 * 20 + 3, 8), *[(60 + n, 8) for n in range(3)]],
    [(64 * 14 + 3, 16), (90, 30), *[(100 + n, 2 + n) for n in range(3)], (0, 12)],
]


@variant(64)
@TIMINGS
@pytest.mark.parametrize("specs", SKEWED, ids=["one block", "several row blocks"])
def test_parts_of_skewed_batches(specs, timing):
    trees = MachineTrees(specs, dtype=BF16, head_dim=64, group=10)
    counts = trees.check(splits=None, timing=timing, skipped=2)
    assert ran(counts, "ex2.approx") and ran(counts, "lg2.approx"), "nothing was merged"


@variant(64)
@pytest.mark.smoke
def test_parts_with_all_features() -> None:
    specs = [(300, 5), (3, 2), (0, 3)]
    heads = {"dtype": FP16, "head_dim": 64, "group": 4}
    trees = MachineTrees(specs, features=FEATURES["window and sinks"], **heads)
    trees.check(splits=2, timing=EARLY)


@variant(64)
@TIMINGS
@pytest.mark.parametrize("page", [16, 64])
def test_a_window_that_begins_in_the_middle_of_a_tile(page: int, timing: Any) -> None:
    """One tile that is not the copy engine's comes before those that are."""
    heads = {"dtype": FP16, "head_dim": 64, "group": 4, "page": page}
    trees = MachineTrees([(700, 3)], features=AttnFeatures(window=600), **heads)
    counts = trees.check(timing=timing)
    # columns 101 to 703: of the 10 tiles the first and the last are not full
    assert ran(counts, "cp.async.bulk.tensor") == 8 * 2 * (64 // page)
    assert ran(counts, "wgmma.mma_async") == 10 * (4 + 4)


@variant(64)
@TIMINGS
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_sinks_in_half_precision(dtype: torch.dtype, timing: Any) -> None:
    """Behind a window that begins within a tile, with a producer."""
    features = AttnFeatures(window=90, sinks=torch.randn(8).to(dtype))
    specs = [(64 * 9 + 30, 15), (39, 9)]
    trees = MachineTrees(specs, dtype=FP16, head_dim=64, group=8, features=features)
    trees.check(timing=timing)


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
    problem = MachineTrees(TREES, kv_heads=2, dtype=FP16, head_dim=64)
    check_spoilt(problem, isolate_nonfinite, lambda: problem.answer(splits=splits))


@variant(64)
@SCHEMES
@pytest.mark.parametrize("kind", ["mbarrier.init", "mbarrier.arrive", "wgmma.wait_group"])
def test_a_missing_wait_is_noticed(nodes, kind, monkeypatch):
    """The control, with everything as late as allowed."""
    timing = replace(LATE, eager_products=False)
    trees = MachineTrees([(64 * 11 + 5, nodes)], dtype=BF16, head_dim=64, group=4, page=64)
    trees.check(timing=timing)
    line = re.compile(rf"^[ \t]*(?:@!?%\w+[ \t]+)?{re.escape(kind)}\b[^;\n]*;", re.MULTILINE)

    def damaged(config):
        kernel = compiled(config)
        ptx, count = line.subn("", kernel.ptx)
        # Not by an AssertionError, which is waited for.
        return replace(kernel, ptx=ptx) if count else pytest.fail(f"there is no {kind}")

    monkeypatch.setattr(cute_machine, "compiled", damaged)
    noticed = "nobody|off by|unused|left|deadlock|before anything was written"
    with pytest.raises((AssertionError, RuntimeError), match=noticed):
        trees.check(timing=timing)
