# SPDX-License-Identifier: Apache-2.0
"""A layer prepared once attends as `tree_attn` does, on every step's metadata."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged import paged_trees
from tests.kernels.spoilt_rows import TREES
from vllm_specplug.kernels import AttnFeatures, TreeLayer, tree_attn

SHAPED = {
    "plain": AttnFeatures(),
    "window": AttnFeatures(window=30),
    "soft cap": AttnFeatures(soft_cap=2.0),
    "sinks": AttnFeatures(sinks=torch.randn(6).bfloat16()),
    "alibi": AttnFeatures(alibi_slopes=torch.rand(6)),
}


@pytest.mark.parametrize("features", SHAPED.values(), ids=list(SHAPED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_tree_attn(compiled: None, dtype: torch.dtype, features: AttnFeatures) -> None:
    problem = paged_trees(TREES, (dtype, "vec"), group=3, features=features)
    layer = TreeLayer(problem.cache, problem.layout, problem.scale, features)
    assert TreeLayer.serves(problem.query, problem.cache)

    def attend(query, key_cache, value_cache, output, meta, scale, layout, features=None) -> None:
        table, meta.block_table = meta.block_table, torch.full_like(meta.block_table, -1)
        layer.attend(query, output, meta, table)

    problem.check(kernel=attend)
    # A later step of the layer, with fewer trees.
    once = [problem.metadata() for _ in range(2)]
    for meta in once:
        meta.plan = meta.plan[:, :1].contiguous()
    outputs = [torch.zeros_like(problem.query) for _ in range(2)]
    layer.attend(problem.query, outputs[0], once[0], problem.block_table)
    tree_attn(
        problem.query, *problem.layout.views(problem.cache), outputs[1], once[1], problem.scale,
        problem.layout, features=features,
    )  # fmt: skip
    assert torch.equal(*outputs) and outputs[0].any()


def test_weights_that_are_loaded_again_count(compiled: None) -> None:
    sinks = torch.zeros(6, dtype=torch.bfloat16)
    features = AttnFeatures(sinks=sinks)
    problem = paged_trees(TREES, group=3, features=features)
    layer = TreeLayer(problem.cache, problem.layout, problem.scale, features)
    meta = problem.metadata()
    outputs = [torch.zeros_like(problem.query) for _ in range(2)]
    layer.attend(problem.query, outputs[0], meta, problem.block_table)
    sinks += 5.0
    layer.attend(problem.query, outputs[1], meta, problem.block_table)
    assert outputs[0].abs().sum() > 1.1 * outputs[1].abs().sum() > 0


def test_caches_of_other_numbers_are_not_served(compiled: None) -> None:
    query = torch.zeros(1, 2, 32)
    assert not TreeLayer.serves(query, torch.zeros(1, 1, 32, 64, dtype=torch.uint8))
    assert not TreeLayer.serves(query.double(), torch.zeros(1, 1, 32, 64, dtype=torch.float64))
