# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over trees: each row as if its branch had been decoded alone, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specplug.kernels import StateTrees, commit_states, delta_tree, tree_conv, tree_delta_rule
from vllm_specplug.kernels.extension import has_cpu_extension

SCALE, EPS = 0.25, 1e-5
Shape = Callable[[int, random.Random], list[int]]


def chain(n: int, rng: random.Random) -> list[int]:
    return list(range(-1, n - 1))


def star(n: int, rng: random.Random) -> list[int]:
    return [-1] + [0] * (n - 1)


def bush(n: int, rng: random.Random) -> list[int]:
    return [-1] + [rng.randrange(max(0, i - 6), i) for i in range(1, n)]


SHAPES = {"chain": chain, "star": star, "bush": bush}


def make_trees(shape: Shape, sizes: list[int], seed: int = 0) -> StateTrees:
    """Trees of these sizes over slots in descending order, two apart."""
    rng, parents, starts = random.Random(seed), [], [0]
    for size in sizes:
        parents += [p if p < 0 else p + starts[-1] for p in shape(size, rng)]
        starts.append(starts[-1] + size)
    slots = list(range(2 * len(sizes) - 1, 0, -2))
    return StateTrees(torch.tensor(starts), torch.tensor(parents, dtype=torch.int64),
                      torch.tensor(slots))  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """Inputs of `tree_delta_rule`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decays: torch.Tensor
    strengths: torch.Tensor
    states: torch.Tensor

    def to(self, dtype: torch.dtype, states: torch.dtype | None = None) -> Layer:
        values = {name: x.to(dtype) for name, x in vars(self).items()}
        return Layer(**{**values, "states": self.states.to(states or dtype)})

    def __call__(self, trees: StateTrees) -> tuple[torch.Tensor, delta_tree.DeltaUpdates]:
        return tree_delta_rule(*vars(self).values(), trees, scale=SCALE, eps=EPS)


def make_layer(trees: StateTrees, hk: int, hv: int, k: int, v: int, gates: str = "usual") -> Layer:
    """float64. Keys share a direction, which makes their system far from diagonal."""
    torch.manual_seed(len(trees.parents))
    rows = len(trees.parents)
    wide = {"dtype": torch.float64}
    keys = torch.randn(rows, hk, k, **wide) + 2 * torch.randn(1, hk, k, **wide)
    decays, strengths = torch.rand(rows, hv, **wide), torch.rand(rows, hv, **wide)
    if gates == "saturated":
        # What exp and sigmoid give far out, and a NaN's breeding ground: nothing is kept at all.
        decays = torch.where(decays < 0.3, 0.0, torch.where(decays > 0.7, 1.0, decays))
        strengths = (strengths > 0.5).double()
    elif gates == "denormal":
        tiny = torch.rand(rows, 2 * hv, **wide) < 0.5
        decays, strengths = (
            torch.where(here, 1e-40 * x, x)
            for here, x in zip(tiny.chunk(2, dim=1), (decays, strengths), strict=True)
        )
    return Layer(
        torch.randn(rows, hk, k, **wide), keys, torch.randn(rows, hv, v, **wide), decays,
        strengths, torch.randn(2 * len(trees.slots) + 1, hv, k, v, **wide),
    )  # fmt: skip


def branch(trees: StateTrees, row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = int(trees.parents[row])
    return path[::-1]


def one_by_one(layer: Layer, trees: StateTrees) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Every row's branch from the committed state, token by token: outputs and states."""
    group = layer.value.shape[1] // layer.key.shape[1]
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()).repeat_interleave(group, dim=1)
        for x in (layer.query, layer.key)
    )
    outputs, states = [], []
    for row, tree in enumerate(trees.trees.tolist()):
        state = layer.states[trees.slots[tree]]
        for t in branch(trees, row):
            state = layer.decays[t, :, None, None] * state
            read = torch.einsum("hkv,hk->hv", state, k[t])
            u = layer.strengths[t, :, None] * (layer.value[t] - read)
            state = state + k[t, :, :, None] * u[:, None, :]
        outputs.append(SCALE * torch.einsum("hkv,hk->hv", state, q[row]))
        states.append(state)
    return torch.stack(outputs), states


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    # Among denormal numbers float32 has no relative precision.
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


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
