# SPDX-License-Identifier: Apache-2.0
"""Trees over recurrent states, and the oracle: every row's branch decoded alone in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_specplug.kernels import StateTrees, delta_tree, tree_delta_rule

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


def check_spoilt(
    run: Callable[[Layer, StateTrees], tuple[torch.Tensor, torch.Tensor]],
    layer: Layer,
    trees: StateTrees,
    spoilt: int,
) -> None:
    """Raises unless NaN in all that one row brings reaches it and its descendants, in `output` and
    `updates`, and leaves all others as they are."""
    clean = run(layer, trees)
    inputs = {name: x.clone() for name, x in vars(layer).items()}
    for name in ("query", "key", "value", "decays", "strengths"):
        inputs[name][spoilt] = float("nan")
    answer = run(Layer(**inputs), trees)
    below = {spoilt}
    for row, parent in enumerate(trees.parents.tolist()):
        if parent in below:
            below.add(row)
    others = [row for row in range(int(trees.starts[1])) if row not in below]
    assert len(below) > 1 and len(others) > 2, "nothing to compare"
    for wanted, found in zip(clean, answer, strict=True):
        assert found[sorted(below)].isnan().all()
        assert error(found[others], wanted[others]) < 1e-6
