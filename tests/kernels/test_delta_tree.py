# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over trees: each row as if its branch had been decoded alone, token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.delta_trees import (
    DeltaSuite,
    branch,
    bush,
    check_spoilt,
    error,
    make_layer,
    make_trees,
)
from vllm_specplug.kernels import commit_states, tree_conv
from vllm_specplug.kernels.extension import has_cpu_extension


class TestCompiled(DeltaSuite):
    """By the compiled kernels, if they are there."""

    def test_rows_between_the_kernels_sizes(self) -> None:
        """Values whose size is no multiple of a vector's are left to the reference."""
        trees = make_trees(bush, self.ragged)
        self.check(trees, make_layer(trees, 1, 1, 8, 24))


class TestReference(DeltaSuite):
    dtype, limit = torch.float64, 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [1, 16, 37])
@pytest.mark.parametrize("width", [1, 4])
def test_convolution_follows_ancestors(
    dtype: torch.dtype, bias: bool, channels: int, width: int
) -> None:
    torch.manual_seed(channels)
    sizes = [1, 5, 64, 2, 17]
    trees = make_trees(bush, sizes)
    kept = width - 1
    rows = torch.randn(len(trees.parents), channels, dtype=torch.float64).to(dtype)
    committed = torch.randn(len(sizes), kept, channels, dtype=torch.float64).to(dtype)
    weight = torch.randn(channels, width, dtype=torch.float64).to(dtype)
    offset = torch.randn(channels, dtype=torch.float64).to(dtype) if bias else None
    actual = tree_conv(
        torch.cat((committed.flatten(0, 1), rows)), trees.windows(width), weight, offset, silu=True
    )
    expected = []
    for row, tree in enumerate(trees.trees.tolist()):
        line = torch.cat((committed[tree], rows[branch(trees, row)])).double().t()[None]
        out = torch.nn.functional.conv1d(
            line, weight.double()[:, None], None if offset is None else offset.double(),
            groups=channels,
        )  # fmt: skip
        expected.append(torch.nn.functional.silu(out[0, :, -1]))
    limit = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]
    assert actual.dtype == dtype
    assert error(actual, torch.stack(expected)) < limit


@pytest.mark.skipif(not has_cpu_extension(), reason="the kernels are not compiled")
def test_the_operators_refuse_what_does_not_fit() -> None:
    trees = make_trees(bush, [4, 3])
    layer = make_layer(trees, 1, 2, 16, 16).to(torch.float32)
    _, updates = layer(trees)
    for bad in (
        replace(trees, slots=torch.tensor([0, 99])), replace(trees, slots=torch.tensor([-1, 0])),
        replace(trees, parents=trees.parents.flip(0)), replace(trees, parents=trees.parents + 1),
        replace(trees, starts=torch.tensor([0, 9, 7])),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="tree_delta_rule"):
            layer(bad)
        with pytest.raises(RuntimeError, match="commit_states"):
            commit_states(layer.states, updates, bad, torch.tensor([3, 6]))
    for rows in ([0, 3], [0, 7], [-1, 5]):
        with pytest.raises(RuntimeError, match="commit_states"):
            commit_states(layer.states, updates, trees, torch.tensor(rows))
    with pytest.raises(RuntimeError, match="key heads"):
        replace(layer, key=layer.key.repeat(1, 3, 1), query=layer.query.repeat(1, 3, 1))(trees)
    windows = trees.windows(4)
    with pytest.raises(RuntimeError, match="tree_conv"):
        tree_conv(torch.randn(13, 8), windows + 1, torch.randn(8, 4), None, silu=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_not_finite_reaches_those_who_continue_it(dtype: torch.dtype) -> None:
    trees = make_trees(bush, [40, 20])
    layer = make_layer(trees, 1, 2, 20, 48).to(dtype)
    clean, clean_updates = layer(trees)
    for name in ("query", "key", "value", "decays", "strengths"):
        getattr(layer, name)[3] = float("nan")
    spoilt, updates = layer(trees)
    check_spoilt(trees, 3, clean, spoilt)
    check_spoilt(trees, 3, clean_updates.updates, updates.updates)
