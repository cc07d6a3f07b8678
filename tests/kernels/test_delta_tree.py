# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over trees: each row as if its branch had been decoded alone, token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.delta_trees import (
    SHAPES,
    Layer,
    branch,
    bush,
    chain,
    check_spoilt,
    error,
    make_layer,
    make_trees,
    one_by_one,
)
from vllm_specplug.kernels import StateTrees, commit_states, delta_tree, tree_conv
from vllm_specplug.kernels.extension import has_cpu_extension


def check(trees: StateTrees, layer: Layer, dtype: torch.dtype, limit: float) -> None:
    expected, states = one_by_one(layer, trees)
    used = layer.to(dtype)
    output, updates = used(trees)
    assert output.dtype == dtype
    assert error(output, expected) < limit
    ends = trees.starts[1:] - 1
    for last in (trees.starts[:-1], ends, (trees.starts[:-1] + ends) // 2):
        after = used.states.clone()
        commit_states(after, updates, trees, last)
        for row, slot in zip(last.tolist(), trees.slots.tolist(), strict=True):
            assert error(after[slot], states[row]) < limit
        # Nobody else's state is touched.
        others = sorted(set(range(len(after))) - set(trees.slots.tolist()))
        assert torch.equal(after[others], used.states[others])


RAGGED = [1, 5, 64, 2, 17]
DTYPES = pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 3e-6)]
)


@DTYPES
@pytest.mark.parametrize("heads", [(2, 2), (2, 4)], ids=["as-many", "twice"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_branch_is_decoded_as_alone(
    shape: str, heads: tuple[int, int], dtype: torch.dtype, limit: float
) -> None:
    trees = make_trees(SHAPES[shape], RAGGED)
    check(trees, make_layer(trees, *heads, 20, 48), dtype, limit)


@DTYPES
@pytest.mark.parametrize("gates", ["saturated", "denormal"])
def test_gates_at_their_ends(gates: str, dtype: torch.dtype, limit: float) -> None:
    trees = make_trees(bush, RAGGED)
    check(trees, make_layer(trees, 1, 2, 32, 32, gates), dtype, limit)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 10**6))
def test_ragged_batches(sizes: list[int], seed: int) -> None:
    trees = make_trees(bush, sizes, seed)
    check(trees, make_layer(trees, 1, 2, 16, 16), torch.float32, 5e-6)


def test_rows_between_the_kernels_sizes() -> None:
    """Values whose size is no multiple of a vector's are left to the reference."""
    trees = make_trees(bush, RAGGED)
    check(trees, make_layer(trees, 1, 1, 8, 24), torch.float32, 3e-6)


def test_states_in_pages_and_in_bfloat16() -> None:
    """States lie in pages with more beside them; bfloat16 ones are computed with as float32."""
    trees = make_trees(bush, RAGGED)
    layer = make_layer(trees, 2, 4, 32, 32)
    layer = layer.to(torch.bfloat16).to(torch.float64)
    expected, states = one_by_one(layer, trees)
    pages = torch.full((len(layer.states), 3 + 4 * 32 * 32), 7.0, dtype=torch.bfloat16)
    paged = pages[:, 3:].view(-1, 4, 32, 32)
    paged.copy_(layer.states)
    used = replace(layer.to(torch.bfloat16), states=paged)
    output, updates = used(trees)
    assert output.dtype == torch.bfloat16
    assert updates.updates.dtype == torch.float32
    assert error(output, expected) < 4e-3
    commit_states(paged, updates, trees, trees.starts[1:] - 1)
    for row, slot in zip((trees.starts[1:] - 1).tolist(), trees.slots.tolist(), strict=True):
        assert error(paged[slot], states[row]) < 4e-3
    assert (pages[:, :3] == 7.0).all()


def test_another_tree_gives_another_answer() -> None:
    """What the tests above rely on: nothing here is blind to parents or to what is committed."""
    trees = make_trees(bush, [30])
    line = make_trees(chain, [30])
    layer = make_layer(trees, 1, 2, 32, 32)
    (tree_output, updates), (line_output, _) = layer(trees), layer(line)
    assert error(line_output, tree_output) > 0.1
    right, wrong = layer.states.clone(), layer.states.clone()
    commit_states(right, updates, trees, torch.tensor([29]))
    commit_states(wrong, updates, line, torch.tensor([29]))
    assert error(wrong, right) > 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [1, 16, 37])
@pytest.mark.parametrize("width", [1, 4])
def test_convolution_follows_ancestors(
    dtype: torch.dtype, bias: bool, channels: int, width: int
) -> None:
    torch.manual_seed(channels)
    trees = make_trees(bush, RAGGED)
    kept = width - 1
    rows = torch.randn(len(trees.parents), channels, dtype=torch.float64).to(dtype)
    committed = torch.randn(len(RAGGED), kept, channels, dtype=torch.float64).to(dtype)
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
def test_compiled_and_reference_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = make_trees(bush, RAGGED)
    layer = make_layer(trees, 2, 4, 128, 128).to(torch.float32)
    output, updates = layer(trees)
    after = layer.states.clone()
    commit_states(after, updates, trees, trees.starts[1:] - 1)
    monkeypatch.setattr(delta_tree, "has_cpu_extension", lambda: False)
    reference, reference_updates = layer(trees)
    expected = layer.states.clone()
    commit_states(expected, reference_updates, trees, trees.starts[1:] - 1)
    assert error(output, reference.double()) < 2e-6
    assert error(after, expected.double()) < 2e-6


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


@DTYPES
def test_what_is_not_finite_reaches_those_who_continue_it(dtype: torch.dtype, limit: float) -> None:
    def run(layer: Layer, trees: StateTrees) -> tuple[torch.Tensor, torch.Tensor]:
        output, updates = layer(trees)
        return output, updates.updates

    trees = make_trees(bush, [40, 20])
    check_spoilt(run, make_layer(trees, 1, 2, 20, 48).to(dtype), trees, 3)
