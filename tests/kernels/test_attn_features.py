# SPDX-License-Identifier: Apache-2.0
"""Windows, soft caps, sinks and ALiBi of tree rows: every branch as a chain that has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.attention_suite import FEATURES, HEADS, FeatureSuite, Specs
from tests.kernels.paged import PagedTrees, paged_trees
from vllm_specplug.kernels import AttnFeatures, reference

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CACHES = [(FP32, "vec"), (FP16, "vec"), (BF16, "vec"), (BF16, "vnni"), (FP32, "table")]
SPECS = [(0, 0), (31, 2), (39, 9), (41, 33), (100, 5)]


def problem(
    features: AttnFeatures, specs: Specs = SPECS, cache: tuple[torch.dtype, str] = CACHES[0],
    **options: Any,
) -> PagedTrees:  # fmt: skip
    options = {"group": HEADS // 2, **options}
    return paged_trees(specs, cache, features=features, **options)


@pytest.mark.usefixtures("compiled")
class TestFeatures(FeatureSuite):
    @pytest.fixture(autouse=True, params=[CACHES[0], *CACHES[2:4]], ids=str)
    def _cache(self, request: pytest.FixtureRequest) -> None:
        self.cache = request.param

    def problem(self, features: AttnFeatures, specs: Specs, **options: Any) -> PagedTrees:
        return problem(features, specs, self.cache, **options)


@pytest.mark.parametrize("name", FEATURES)
def test_every_isa_matches_branches_run_as_chains(isa: str, name: str) -> None:
    for cache in CACHES:
        problem(FEATURES[name], cache=cache).check()


@pytest.mark.parametrize("name", FEATURES)
def test_reference_matches_the_same_oracle(name: str) -> None:
    for dense in (False, True):
        made = problem(FEATURES[name], [(0, 0), (45, 9), (70, 5)], dense=dense)
        made.check(kernel=reference.tree_attn_reference)


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
    with pytest.raises(RuntimeError, match=r"sinks must be \[Hq\]"):
        made.answer()
