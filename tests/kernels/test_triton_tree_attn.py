# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, against an oracle that knows neither masks nor pages.

Shapes are small, because the interpreter is slow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.attention_suite import DenseSuite, Specs
from tests.kernels.device_trees import FP16, FP32, DeviceTrees
from vllm_specplug.kernels import AttnFeatures

pytest.importorskip("triton")

from vllm_specplug.kernels import tree_attn_triton
from vllm_specplug.kernels.tree_attn_triton import (
    TreeAttnConfig,
    grid_split_of,
    tree_words,
)

pytestmark = pytest.mark.usefixtures("interpreter")


class TestTrees(DenseSuite):
    def problem(self, specs: Specs, **options: Any) -> DeviceTrees:
        return DeviceTrees(specs, **options)


@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "group", "kv_heads"), [(96, 3, 1), (80, 1, 2), (64, 8, 1)])
def test_head_shapes_in_half_precision(dtype, head_dim, group, kv_heads):
    DeviceTrees(
        [(33, 9), (0, 12)], dtype=dtype, head_dim=head_dim, group=group, kv_heads=kv_heads
    ).check()


@pytest.mark.parametrize("head_dim", [264, 512])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_wide_heads(head_dim, dtype):
    specs = [(33, 9), (0, 2), (260, 3)]
    DeviceTrees(specs, dtype=dtype, head_dim=head_dim).check(splits=2)
    features = AttnFeatures(window=40, soft_cap=1.5)
    for options in ({"dense": True}, {"features": features}):
        DeviceTrees(specs[:2], dtype=dtype, head_dim=head_dim, **options).check(splits=1)


def test_words_of_a_damaged_tree_end():
    problem = DeviceTrees([(5, 8)])
    meta = problem.metadata()
    meta.parent_rows[3] = 7
    words = tree_words(meta)
    assert int(words[3, 0]) == 1 << 3


def test_words_match_the_host_builder():
    from vllm_specplug.kernels import ancestor_words

    problem = DeviceTrees([(0, 130), (0, 0), (0, 64)], group=1)
    assert torch.equal(tree_words(problem.metadata()), ancestor_words(problem.parents))


def test_configurations_fit_their_device():
    hopper, ada = 227 * 1024, 99 * 1024
    for rows in (1, 16, 65, 257 * 8):
        for dim in (64, 96, 128, 256, 512):
            for shared in (hopper, ada):
                config = TreeAttnConfig.choose(rows, dim, 2, shared)
                stage = 2 * config.block_n * dim * 2
                assert config.num_stages * stage + config.block_m * dim * 2 <= shared
                assert 64 % config.block_n == 0
                config = TreeAttnConfig.choose(rows, dim, 4, shared)
                # Of two stages the compiler keeps one beside the tile in use.
                assert config.num_stages == 2
                assert (2 * config.block_n + config.block_m) * dim * 4 + 1024 <= shared
                assert 64 % config.block_n == 0


@pytest.mark.parametrize(
    ("trees", "rows", "is_small"), [(1, 64, True), (8, 16, True), (32, 8, False), (8, 64, False)]
)
def test_tails_have_small_tiles_while_all_run_at_once(monkeypatch, trees, rows, is_small):
    """On an H100, 4 query heads to each of 8 KV heads."""
    device = torch.device("cuda")
    monkeypatch.setitem(tree_attn_triton._LIMITS, device, (132, 227 * 1024, 9))
    whole = TreeAttnConfig.choose(4 * rows, 128, 2, 227 * 1024)
    config = tree_attn_triton.tail_config(whole, device, trees, 8, 4 * rows)
    assert config == (tree_attn_triton.SMALL_TAIL if is_small else whole)


@pytest.mark.parametrize("longest", [100, 512, 2000, 40_000])
def test_one_tree_takes_the_variant_that_several_may(longest):
    """Kernels are warmed up with one."""
    config = TreeAttnConfig.choose(64, 128, 2, 227 * 1024)
    for blocks in (1, 8, 100, 230, 264, 500, 1055, 1056, 2000):
        one = grid_split_of(1, blocks, config, longest, 132, None)
        for trees in (2, 3, 7, 40):
            several = grid_split_of(trees, blocks, config, longest, 132, None)
            assert one.parts or not several.parts, (blocks, trees)
    assert not grid_split_of(1, 8, config, longest, 132, 1).parts
