# SPDX-License-Identifier: Apache-2.0
"""Windows, soft caps, sinks and ALiBi of tree rows: every branch as a chain that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.attention_suite import FEATURES, HEADS, FeatureSuite, Specs
from tests.kernels.paged import PagedTrees, layout_of, random_parents
from vllm_specplug.kernels import AttnFeatures, ancestor_words, causal_words, reference, tree_attn

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CACHES = [(FP32, "vec"), (FP16, "vec"), (BF16, "vec"), (BF16, "vnni"), (FP32, "table")]
SPECS = [(0, 0), (31, 2), (39, 9), (41, 33), (100, 5)]


class Problem(PagedTrees):
    """Splits of a context are threads here."""

    is_told_chains = False
    run: Callable[..., None] = staticmethod(tree_attn)

    def take_pages(self, other: Problem) -> None:
        self.block_table, self.cache = other.block_table, other.cache

    def tell_chains(self) -> None:
        self.is_told_chains = True

    def check(self, *, splits: int = 1, features: AttnFeatures | None = None) -> None:  # type: ignore[override]
        """`features` are told to the kernel only."""
        parents = [parents for _, parents in self.trees]
        words = causal_words(self.rows) if self.is_told_chains else ancestor_words(parents)

        def told(*args: Any, **options: Any) -> None:
            self.run(*args, **{**options, "features": features or self.features})

        super().check(told, words, splits)


def problem(
    features: AttnFeatures, specs: Specs = SPECS, cache: tuple[torch.dtype, str] = CACHES[0], *,
    page: int = 32, head: int = 32, mask: str = "tree", kv_heads: int = 2, group: int = HEADS // 2,
    dense: bool = False,
) -> Problem:  # fmt: skip
    rng = np.random.default_rng(0)
    trees = [
        (context, random_parents(n, rng) if mask == "tree" else np.arange(-1, n - 1))
        for context, n in specs
    ]
    layout = layout_of(cache[1], cache[0], page, head)
    return Problem(layout, kv_heads, group, trees, features=features, dense=dense)


@pytest.mark.usefixtures("compiled")
class TestFeatures(FeatureSuite):
    @pytest.fixture(autouse=True, params=[CACHES[0], *CACHES[2:4]], ids=str)
    def _cache(self, request: pytest.FixtureRequest) -> None:
        self.cache = request.param

    def problem(self, features: AttnFeatures, specs: Specs, **options: Any) -> Problem:
        return problem(features, specs, self.cache, **options)


@pytest.mark.parametrize("name", FEATURES)
def test_every_isa_matches_branches_run_as_chains(isa: str, name: str) -> None:
    for cache in CACHES:
        problem(FEATURES[name], cache=cache).check()


@pytest.mark.parametrize("name", FEATURES)
def test_reference_matches_the_same_oracle(name: str) -> None:
    for dense in (False, True):
        made = problem(FEATURES[name], [(0, 0), (45, 9), (70, 5)], dense=dense)
        made.run = reference.tree_attn_reference
        made.check()


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("cache", CACHES[:3], ids=str)
def test_dense_tails_and_blocks_of_sixteen(
    compiled: None, name: str, cache: tuple[torch.dtype, str]
) -> None:
    """Half of a group of slots may be another request's."""
    specs = [(c, 5) for c in (0, 15, 16, 17, 40, 55, 56, 57, 71, 72)]
    for dense in (False, True):
        problem(FEATURES[name], specs, cache, page=16, head=80, dense=dense).check()


def test_sinks_of_other_heads_are_refused(compiled: None) -> None:
    made = problem(AttnFeatures(sinks=torch.zeros(HEADS + 1)), [(3, 1)])
    made.expected = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"sinks must be \[Hq\]"):
        made.check()
