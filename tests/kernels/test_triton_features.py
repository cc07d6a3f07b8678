# SPDX-License-Identifier: Apache-2.0
"""Windows, soft caps, sinks, slopes and 8-bit caches in the Triton kernel, in Triton's interpreter.

Pages that left a window are NaN, and their table entries lead nowhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.device_trees import FP16, DeviceTrees
from vllm_specplug.kernels import AttnFeatures

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("interpreter")

KV_HEADS, GROUP = 2, 2
HEADS = KV_HEADS * GROUP


def per_head(seed: int = 0, scale: float = 2.0, heads: int = HEADS) -> torch.Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(seed)) * scale


# Scales that are no powers of two, and one per tensor or KV head.
CACHE = {"key_scales": torch.tensor(0.37), "value_scales": torch.tensor([1.3])}
BY_HEAD = {"key_scales": torch.tensor([0.11, 0.7]), "value_scales": torch.tensor([1.9, 0.6])}
QUERY = {"query_scales": torch.tensor(0.3)}
FEATURES = {
    "window": AttnFeatures(window=40),
    "window of one": AttnFeatures(window=1),
    "window of three": AttnFeatures(window=3),
    "window without an end": AttnFeatures(window=2**40),
    "soft cap": AttnFeatures(soft_cap=0.7),
    "wide soft cap": AttnFeatures(soft_cap=50.0),
    "sinks": AttnFeatures(sinks=per_head()),
    "far sinks": AttnFeatures(sinks=torch.tensor([-90.0, 90.0, -1e30, float("-inf")])),
    "alibi": AttnFeatures(alibi_slopes=per_head(1, 0.1).abs()),
    "cache": AttnFeatures(**CACHE),
    "cache by head": AttnFeatures(**BY_HEAD),
    "cache and query": AttnFeatures(**BY_HEAD, query_scales=torch.tensor([0.3, 0.05])),
    "window and sinks": AttnFeatures(window=33, sinks=per_head()),
    "window and soft cap": AttnFeatures(window=33, soft_cap=1.1),
    "all": AttnFeatures(
        window=37, soft_cap=1.5, sinks=per_head(2), alibi_slopes=per_head(3, 0.1).abs(),
        **CACHE, **QUERY,
    ),
}  # fmt: skip


def problem(features: AttnFeatures, specs: list[tuple[int, int]], **options: Any) -> DeviceTrees:
    sizes = {"kv_heads": KV_HEADS, "group": GROUP}
    return DeviceTrees(specs, features=features, **{**sizes, **options})


@pytest.mark.parametrize("name", FEATURES)
def test_each_matches_branches_run_as_chains(name: str) -> None:
    problem(FEATURES[name], [(0, 0), (31, 2), (39, 9), (100, 33)]).check()


@pytest.mark.parametrize("name", FEATURES)
def test_shares_of_a_split_context_are_merged(name: str) -> None:
    made = problem(FEATURES[name], [(300, 5), (3, 2), (0, 3)])
    made.check(splits=2)


@pytest.mark.parametrize("name", ["window", "window of three", "sinks", "cache by head", "all"])
@pytest.mark.parametrize("mask", ["tree", "causal"])
def test_dense_tails_are_not_quantised(name: str, mask: str) -> None:
    problem(FEATURES[name], [(0, 4), (45, 9)], dense=True, mask=mask).check()


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("window", [2, 15, 16, 17, 64, 65])
def test_windows_around_page_and_tree_edges(page: int, window: int) -> None:
    made = problem(AttnFeatures(window=window), [(64, 6), (70, 12)], page=page, kv_heads=1)
    made.check()


def test_windows_that_are_split() -> None:
    """Splits share what the window leaves, and rows may see nothing of one."""
    made = problem(AttnFeatures(window=600), [(900, 3), (700, 9)], group=1, kv_heads=1)
    made.check(splits=3)
    # Deep rows: all of the first split is behind the window of the last ones.
    made = problem(AttnFeatures(window=300), [(560, 80)], group=1, kv_heads=1, mask="causal")
    made.check(splits=2)


def test_a_deep_chain_outgrows_the_window() -> None:
    """The window cuts into the tree itself, beyond the first word of its mask."""
    for window in (1, 64, 65):
        made = problem(AttnFeatures(window=window), [(50, 80)], mask="causal", kv_heads=1, group=1)
        made.check()


@pytest.mark.parametrize("name", ["all", "cache by head", "wide soft cap"])
def test_half_precision(name: str) -> None:
    problem(FEATURES[name], [(33, 9), (0, 12)], dtype=FP16, head_dim=24).check()


@pytest.mark.parametrize("change", [
    {"window": 0}, {"window": 39}, {"window": 41}, {"soft_cap": 0.0}, {"sinks": None},
    {"alibi_slopes": None}, {"key_scales": torch.tensor(1.0)}, {"value_scales": torch.tensor(1.0)},
    {"query_scales": None},
])  # fmt: skip
@pytest.mark.parametrize("splits", [1, 2])
def test_the_check_notices_a_feature_left_out(change: dict[str, Any], splits: int) -> None:
    features = AttnFeatures(
        window=40, soft_cap=1.5, sinks=per_head(), alibi_slopes=per_head(1, 0.1).abs(),
        **CACHE, **QUERY,
    )  # fmt: skip
    made = problem(features, [(30, 12), (70, 12)])
    whole = problem(replace(features, window=0), [(30, 12), (70, 12)])
    # The table is whole again, as a kernel without a window would follow it.
    made.block_table, made.cache = whole.block_table, whole.cache
    made.key_cache, made.value_cache = whole.key_cache, whole.value_cache
    made.check(splits=splits)
    with pytest.raises(AssertionError, match="off by"):
        made.check(splits=splits, features=replace(features, **change))


def test_the_check_notices_a_sink_in_every_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging adds what each split holds."""
    made = problem(AttnFeatures(sinks=per_head()), [(600, 3)])
    made.check(splits=2)
    twice = AttnFeatures(sinks=per_head() + float(np.log(2)))
    with pytest.raises(AssertionError, match="off by"):
        made.check(splits=2, features=twice)


def test_the_check_notices_a_window_from_the_slot() -> None:
    """A row's lower bound follows its depth: counted from its slot, siblings would push it."""
    made = problem(AttnFeatures(window=40), [(70, 12)])
    made.check()
    # As if every row hung below the one before it.
    real, made.mask = made.expected(), "causal"
    assert not torch.allclose(torch.cat(real), torch.cat(made.expected()))
    made.expected = lambda: real  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="off by"):
        made.check()


def test_the_check_notices_a_page_that_left_the_window() -> None:
    made = problem(AttnFeatures(window=40), [(70, 4)])
    gone = problem(AttnFeatures(), [(70, 4)]).block_table[1, 0]
    (spare,) = set(range(len(made.cache))) - set(made.block_table[1].tolist()) - {int(gone)}
    made.block_table[1, 0] = spare
    made.check()
    # One position further back is in that page.
    with pytest.raises(AssertionError, match="unused slot|off by"):
        made.check(features=AttnFeatures(window=60))
