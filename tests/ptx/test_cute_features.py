# SPDX-License-Identifier: Apache-2.0
"""Windows and sinks in the CuTe kernel's own PTX, stepped on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from tests.kernels.attention_suite import FEATURES, FeatureSuite, Specs, per_head
from tests.ptx.cute_machine import BF16, EARLY, FP16, LATE, MachineTrees, ran, variant
from vllm_specplug.kernels import AttnFeatures


def problem(features: AttnFeatures, specs: Specs, **options: Any) -> MachineTrees:
    sizes = {"dtype": FP16, "head_dim": 64, "group": 4}
    return MachineTrees(specs, features=features, **{**sizes, **options})


@variant(64)
class TestFeatures(FeatureSuite):
    controlled = AttnFeatures(window=40, sinks=per_head())

    def problem(self, features: AttnFeatures, specs: Specs, **options: Any) -> MachineTrees:
        if features.soft_cap or features.alibi_slopes is not None:
            pytest.skip("the Triton kernel serves such layers")
        return problem(features, specs, **options)


@variant(64)
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_sinks_in_half_precision(dtype: torch.dtype) -> None:
    problem(AttnFeatures(sinks=FEATURES["far sinks"].sinks.to(dtype)), [(200, 14)]).check()


@variant(64)
@pytest.mark.smoke
def test_parts_with_all_features() -> None:
    specs = [(300, 5), (3, 2), (0, 3)]
    problem(FEATURES["window and sinks"], specs).check(splits=2, timing=EARLY)


@variant(64)
@pytest.mark.parametrize("timing", [LATE, EARLY])
@pytest.mark.parametrize("page", [16, 64])
def test_a_window_that_begins_in_the_middle_of_a_tile(page: int, timing: Any) -> None:
    """One tile that is not the copy engine's comes before those that are."""
    counts = problem(AttnFeatures(window=600), [(700, 3)], page=page).check(timing=timing)
    # columns 101 to 703: of the 10 tiles the first and the last are not full
    assert ran(counts, "cp.async.bulk.tensor") == 8 * 2 * (64 // page)
    assert ran(counts, "wgmma.mma_async") == 10 * (4 + 4)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_other_head_sizes(head_dim: int) -> None:
    heads = {"head_dim": head_dim, "dtype": BF16, "page": 64, "kv_heads": 2, "group": 2}
    problem(FEATURES["window and sinks"], [(150, 30)], **heads).check()
