# SPDX-License-Identifier: Apache-2.0
"""Tests that every kernel of tree attention passes; a module of a kernel has subclasses of these.

A problem is made of (context, nodes) of each tree and has `check(splits=1, skipped=0)`, which
compares the kernel with an oracle that knows neither masks nor pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_specplug.kernels import AttnFeatures
from vllm_specplug.kernels.features import PLAIN

Specs = list[tuple[int, int]]
HEADS = 4


class TreeSuite:
    """Edges of masks, pages and parts."""

    # One head, for problems of many rows.
    narrow: dict[str, Any] = {"group": 1}

    def problem(self, specs: Specs, **options: Any) -> Any:
        raise NotImplementedError

    @pytest.mark.parametrize("nodes", [0, 1, 2, 62, 63, 64, 65])
    def test_node_counts_around_word_edges(self, nodes: int) -> None:
        self.problem([(19, nodes), (3, 1)]).check()

    def test_largest_tree(self) -> None:
        self.problem([(20, 256)], **self.narrow).check()

    @pytest.mark.parametrize("page", [16, 64, 128])
    def test_context_lengths_around_tile_and_page_edges(self, page: int) -> None:
        contexts = (0, 1, 15, 16, 17, 63, 64, 65)
        self.problem([(c, 3) for c in contexts], page=page, **self.narrow).check()

    @pytest.mark.parametrize("splits", [2, 3])
    def test_splits_are_merged_and_short_contexts_leave_some_empty(self, splits: int) -> None:
        specs = [(530, 5), (3, 2), (0, 9), (257, 0)]
        self.problem(specs, **self.narrow).check(splits=splits, skipped=2)

    def test_trees_without_rows_are_skipped(self) -> None:
        self.problem([(70, 5), (3, 2)]).check(skipped=3)

    def test_shared_prefix_pages(self) -> None:
        made = self.problem([(32, 6), (40, 9)], page=16)
        made.share_pages(2)
        made.check()

    def test_the_check_notices_a_wrong_mask(self) -> None:
        made = self.problem([(5, 8)])
        made.tell_chains()
        with pytest.raises(AssertionError, match="off by"):
            made.check()


class DenseSuite(TreeSuite):
    """Also trees whose own keys and values are in no cache."""

    @pytest.mark.parametrize("mask", ["tree", "causal", "full"])
    @pytest.mark.parametrize("page", [16, 64])
    def test_dense_tails(self, mask: str, page: int) -> None:
        specs = [(0, 15), (40, 66), (64, 1)]
        self.problem(specs, dense=True, mask=mask, page=page).check()


def per_head(seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(HEADS, generator=torch.Generator().manual_seed(seed)) * scale


SLOPES = per_head(1, 0.1).abs()
FEATURES = {
    "window": AttnFeatures(window=40),
    "window of one": AttnFeatures(window=1),
    "window of three": AttnFeatures(window=3),
    "window without an end": AttnFeatures(window=2**40),
    "soft cap": AttnFeatures(soft_cap=0.7),
    "wide soft cap": AttnFeatures(soft_cap=50.0),
    "sinks": AttnFeatures(sinks=per_head()),
    "far sinks": AttnFeatures(sinks=torch.tensor([-90.0, 90.0, -1e30, float("-inf")])),
    "alibi": AttnFeatures(alibi_slopes=SLOPES),
    "window and sinks": AttnFeatures(window=33, sinks=per_head()),
    "window and alibi": AttnFeatures(window=70, alibi_slopes=SLOPES),
    "all": AttnFeatures(window=90, soft_cap=1.5, sinks=per_head(2), alibi_slopes=SLOPES),
}
# What a control changes of `FeatureSuite.controlled`.
CONTROLS: list[tuple[str, Any]] = [
    ("window", 0), ("window", 39), ("window", 41), ("sinks", None), ("soft_cap", 0.0),
    ("alibi_slopes", None),
]  # fmt: skip


class FeatureSuite:
    """Windows, soft caps, sinks and slopes, of `HEADS` query heads. Pages that left a window are
    NaN, and their table entries lead nowhere. `problem` skips features that a kernel lacks."""

    controlled = AttnFeatures(window=40, soft_cap=1.5, sinks=per_head(), alibi_slopes=SLOPES)
    # One query head, for windows of other problems.
    narrow: dict[str, Any] = {"group": 1, "kv_heads": 1}

    def problem(self, features: AttnFeatures, specs: Specs, **options: Any) -> Any:
        raise NotImplementedError

    @pytest.mark.parametrize("name", FEATURES)
    def test_each_matches_branches_run_as_chains(self, name: str) -> None:
        self.problem(FEATURES[name], [(0, 0), (31, 2), (39, 9), (200, 14)]).check()

    # Features for which the place of a part counts.
    @pytest.mark.parametrize("name", ["sinks", "far sinks", "alibi", "window and sinks", "all"])
    def test_splits_count_a_sink_once(self, name: str) -> None:
        self.problem(FEATURES[name], [(300, 5), (3, 2), (0, 3)]).check(splits=2)

    @pytest.mark.parametrize("name", ["window", "window of three", "sinks", "alibi", "all"])
    @pytest.mark.parametrize("mask", ["tree", "causal"])
    def test_dense_tails(self, name: str, mask: str) -> None:
        self.problem(FEATURES[name], [(0, 4), (45, 9), (128, 5)], dense=True, mask=mask).check()

    @pytest.mark.parametrize(
        ("page", "window"),
        [
            *((16, window) for window in (2, 15, 16, 17)),
            *((64, window) for window in (16, 64, 65)),
            *((128, window) for window in (2, 65, 128)),
        ],
    )
    def test_windows_around_page_and_tree_edges(self, page: int, window: int) -> None:
        specs = [(64, 6), (70, 12)]
        self.problem(AttnFeatures(window=window), specs, page=page, **self.narrow).check()

    @pytest.mark.parametrize("window", [1, 64, 65])
    def test_a_deep_chain_outgrows_the_window(self, window: int) -> None:
        """The window cuts into the tree itself, beyond the first word of its mask."""
        made = self.problem(AttnFeatures(window=window), [(50, 80)], mask="causal", **self.narrow)
        made.check()

    def test_splits_share_what_the_window_leaves(self) -> None:
        specs = [(900, 3), (700, 9)]
        self.problem(AttnFeatures(window=600), specs, **self.narrow).check(splits=3)
        # All of the first split is behind the window of the last rows.
        made = self.problem(AttnFeatures(window=300), [(560, 80)], mask="causal", **self.narrow)
        made.check(splits=2)

    @pytest.mark.parametrize(("name", "value"), CONTROLS)
    def test_the_check_notices_a_feature_left_out(self, name: str, value: Any) -> None:
        specs = [(30, 12), (70, 12)]
        if not replace(PLAIN, **{name: getattr(self.controlled, name)}).kind.names:
            pytest.skip("this kernel has no such feature")
        made = self.problem(self.controlled, specs)
        # The table is whole again, as a kernel without a window would follow it.
        made.take_pages(self.problem(replace(self.controlled, window=0), specs))
        made.check(splits=2)
        with pytest.raises(AssertionError, match="off by|unused slot"):
            made.check(splits=2, features=replace(self.controlled, **{name: value}))

    def test_the_check_notices_a_sink_in_every_split(self) -> None:
        made = self.problem(AttnFeatures(sinks=per_head()), [(300, 3)])
        made.check(splits=2)
        with pytest.raises(AssertionError, match="off by"):
            made.check(splits=2, features=AttnFeatures(sinks=per_head() + 0.6931472))

    def test_the_check_notices_a_window_from_the_slot(self) -> None:
        """A row's lower bound follows its depth: counted from its slot, siblings would push it."""
        made = self.problem(AttnFeatures(window=40), [(70, 12)])
        made.check()
        # As if every row hung below the one before it.
        real = made.expected()
        made.tell_chains()
        made.expected = lambda *_: real
        with pytest.raises(AssertionError, match="off by"):
            made.check()

    def test_the_check_notices_a_page_that_left_the_window(self) -> None:
        made = self.problem(AttnFeatures(window=40), [(170, 4)])
        made.check()
        with pytest.raises(Exception, match="unused slot|off by|outside|wild"):
            made.check(features=AttnFeatures(window=130))
