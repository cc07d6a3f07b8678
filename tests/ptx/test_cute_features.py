# SPDX-License-Identifier: Apache-2.0
"""Windows, soft caps, sinks and slopes in the CuTe kernel's own PTX, stepped on the CPU.

Pages that left a window are NaN, and their table entries lead nowhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from tests.ptx.cute_machine import BF16, EARLY, FP16, LATE, MachineTrees, ran, variant
from vllm_specplug.kernels import AttnFeatures

GROUP = 4


def per_head(seed: int = 0, scale: float = 2.0, heads: int = GROUP) -> torch.Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(seed)) * scale


SLOPES = per_head(1, 0.1).abs()
FEATURES = {
    "window": AttnFeatures(window=40),
    "window of one": AttnFeatures(window=1),
    "window of three": AttnFeatures(window=3),
    "window without an end": AttnFeatures(window=2**40),
    "soft cap": AttnFeatures(soft_cap=0.7),
    "wide soft cap": AttnFeatures(soft_cap=50.0),
    "sinks": AttnFeatures(sinks=per_head()),
    "sinks in half precision": AttnFeatures(sinks=per_head().to(FP16)),
    "far sinks": AttnFeatures(sinks=torch.tensor([-90.0, 90.0, -1e30, float("-inf")]).to(BF16)),
    "alibi": AttnFeatures(alibi_slopes=SLOPES),
    "window and sinks": AttnFeatures(window=33, sinks=per_head()),
    "window and alibi": AttnFeatures(window=70, alibi_slopes=SLOPES),
    "all": AttnFeatures(window=90, soft_cap=1.5, sinks=per_head(2), alibi_slopes=SLOPES),
}


def problem(features: AttnFeatures, specs: list[tuple[int, int]], **options: Any) -> MachineTrees:
    sizes = {"dtype": FP16, "head_dim": 64, "group": GROUP}
    return MachineTrees(specs, features=features, **{**sizes, **options})


@variant(64)
@pytest.mark.parametrize("name", FEATURES)
def test_each_matches_branches_run_as_chains(name):
    problem(FEATURES[name], [(0, 0), (39, 9), (200, 14)]).check()


@variant(64)
def test_a_soft_cap_of_scores_whose_exponential_overflows():
    trees = problem(FEATURES["soft cap"], [(39, 9), (70, 3)])
    trees.query *= 300
    trees.check()


@variant(64)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.smoke] * (n == "all")) for n in FEATURES]
)
def test_splits_count_a_sink_once(name):
    problem(FEATURES[name], [(300, 5), (3, 2), (0, 3)]).check(splits=2, timing=EARLY)


@variant(64)
@pytest.mark.parametrize("name", ["window", "window of three", "sinks", "alibi", "all"])
@pytest.mark.parametrize("mask", ["tree", "causal"])
def test_dense_tails(name, mask):
    problem(FEATURES[name], [(0, 4), (45, 9), (128, 5)], dense=True, mask=mask).check()


@variant(64)
@pytest.mark.parametrize("timing", [LATE, EARLY])
@pytest.mark.parametrize("page", [16, 64])
def test_a_window_that_begins_in_the_middle_of_a_tile(page, timing):
    """One tile that is not the copy engine's comes before those that are."""
    counts = problem(AttnFeatures(window=600), [(700, 3)], page=page).check(timing=timing)
    # columns 101 to 703: of the 10 tiles the first and the last are not full
    assert ran(counts, "cp.async.bulk.tensor") == 8 * 2 * (64 // page)
    assert ran(counts, "wgmma.mma_async") == 10 * (4 + 4)


@variant(64)
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("window", [2, 15, 16, 17, 64, 65, 128])
def test_windows_around_page_and_tree_edges(page, window):
    problem(AttnFeatures(window=window), [(64, 6), (70, 12), (300, 3)], page=page).check()


@variant(64)
@pytest.mark.parametrize("window", [1, 64, 65])
def test_a_deep_chain_outgrows_the_window(window):
    """The window cuts into the tree itself, beyond the first word of its mask."""
    made = problem(AttnFeatures(window=window), [(50, 80)], mask="causal", group=1)
    made.check()


@variant(64)
def test_splits_share_what_the_window_leaves():
    problem(AttnFeatures(window=600), [(900, 3), (700, 9)], group=1).check(splits=3)
    # All of the first split is behind the window of the last rows.
    made = problem(AttnFeatures(window=300), [(560, 80)], group=1, mask="causal")
    made.check(splits=2)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_other_head_sizes(head_dim):
    heads = {"head_dim": head_dim, "dtype": BF16, "page": 64, "kv_heads": 2}
    features = replace(FEATURES["all"], sinks=per_head(heads=8), alibi_slopes=SLOPES.repeat(2))
    problem(features, [(150, 30)], **heads).check()


@variant(64)
@pytest.mark.parametrize(
    ("change", "split"),
    [
        ({"window": 0}, True),
        ({"window": 39}, True),
        ({"window": 41}, False),
        ({"soft_cap": 0.0}, False),
        ({"sinks": None}, True),
        ({"alibi_slopes": None}, False),
    ],
)
def test_the_check_notices_a_feature_left_out(change, split):
    features = AttnFeatures(window=40, soft_cap=1.5, sinks=per_head(), alibi_slopes=SLOPES)
    specs = [(30, 5), (70, 12)]
    made, whole = problem(features, specs), problem(replace(features, window=0), specs)
    # The table is whole again, as a kernel without a window would follow it.
    made.block_table, made.cache = whole.block_table, whole.cache
    made.key_cache, made.value_cache = whole.key_cache, whole.value_cache
    with pytest.raises(AssertionError, match="off by"):
        made.check(features=replace(features, **change), splits=2 if split else 1)


@variant(64)
def test_the_check_notices_a_sink_in_every_split():
    made = problem(AttnFeatures(sinks=per_head()), [(300, 3)])
    made.check(splits=2)
    twice = AttnFeatures(sinks=per_head() + 0.6931472)
    with pytest.raises(AssertionError, match="off by"):
        made.check(splits=2, features=twice)


@variant(64)
def test_the_check_notices_a_window_from_the_slot():
    """A row's lower bound follows its depth: counted from its slot, siblings would push it."""
    made = problem(AttnFeatures(window=40), [(70, 12)])
    made.check()
    # As if every row hung below the one before it.
    real, made.mask = made.expected(), "causal"
    made.expected = lambda: real
    with pytest.raises(AssertionError, match="off by"):
        made.check()


@variant(64)
@pytest.mark.parametrize("page", [16, 64])
def test_the_check_notices_a_page_that_left_the_window(page):
    made = problem(AttnFeatures(window=40), [(170, 4)], page=page)
    made.check()
    # The root of a longer window is still in sight of a page that is gone.
    with pytest.raises(AssertionError, match=r"unused slot|off by|outside|wild"):
        made.check(features=AttnFeatures(window=130))
