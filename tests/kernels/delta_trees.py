# SPDX-License-Identifier: Apache-2.0
"""Trees over recurrent states, and the oracle: every row's branch decoded alone in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from vllm_specplug.kernels import StateTrees, commit_states, delta_tree, tree_delta_rule

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
    trees: StateTrees, spoilt_row: int, clean: torch.Tensor, spoilt: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Raises unless NaN in what one row brings reached it and its descendants and no other row of
    its tree, in numbers [M, ...] of the rows. Returns these two."""
    first = range(int(trees.starts[1]))
    below = [row for row in first if spoilt_row in branch(trees, row)]
    others = [row for row in first if row not in below]
    assert len(below) > 1 and any(row > spoilt_row for row in others), "nothing to compare"
    assert spoilt[below].flatten(1).isnan().any(1).all(), "a row does not see its ancestor"
    for row in others:
        assert torch.allclose(clean[row], spoilt[row], atol=1e-6), "a row sees another branch"
    return below, others


class DeltaSuite:
    """Tests that every implementation of the rule passes; see `Layer` for its inputs."""

    dtype, limit = torch.float32, 3e-6
    ragged = [1, 5, 64, 2, 17]
    key_size, value_size = 20, 48
    # Of rows over states in bfloat16.
    beside_bfloat16 = torch.bfloat16

    def run(self, layer: Layer, trees: StateTrees) -> tuple[torch.Tensor, Any]:
        """Output, and what `commit` takes."""
        return layer(trees)

    def commit(
        self, states: torch.Tensor, layer: Layer, updates: Any, trees: StateTrees,
        last_rows: torch.Tensor,
    ) -> None:  # fmt: skip
        commit_states(states, updates, trees, last_rows)

    def in_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """States [S, 2, 32, 16] in pages of as many numbers."""
        return pages.view(-1, 2, 32, 16)

    def check(self, trees: StateTrees, layer: Layer) -> None:
        expected, states = one_by_one(layer, trees)
        used = layer.to(self.dtype)
        output, updates = self.run(used, trees)
        assert output.dtype == self.dtype and error(output, expected) < self.limit
        ends = trees.starts[1:] - 1
        for last in (trees.starts[:-1], ends, (trees.starts[:-1] + ends) // 2):
            after = used.states.clone()
            self.commit(after, used, updates, trees, last)
            for row, slot in zip(last.tolist(), trees.slots.tolist(), strict=True):
                assert error(after[slot], states[row]) < self.limit
            # Nobody else's state is touched.
            others = sorted(set(range(len(after))) - set(trees.slots.tolist()))
            assert torch.equal(after[others], used.states[others])

    @pytest.mark.parametrize("heads", [(1, 1), (1, 2)], ids=["as-many", "twice"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_every_branch_is_decoded_as_alone(self, shape: str, heads: tuple[int, int]) -> None:
        trees = make_trees(SHAPES[shape], self.ragged)
        self.check(trees, make_layer(trees, *heads, self.key_size, self.value_size))

    @pytest.mark.parametrize("gates", ["saturated", "denormal"])
    def test_gates_at_their_ends(self, gates: str) -> None:
        trees = make_trees(bush, [3, 20])
        self.check(trees, make_layer(trees, 1, 2, 32, 32, gates))

    @pytest.mark.parametrize("seed", range(6))
    def test_ragged_batches(self, seed: int) -> None:
        draw = random.Random(seed)
        sizes = [draw.randint(1, 30) for _ in range(draw.randint(1, 4))]
        trees = make_trees(bush, sizes, seed)
        self.check(trees, make_layer(trees, 1, 2, 16, 16))

    def test_states_in_pages_and_in_bfloat16(self) -> None:
        """States lie in pages with more beside them."""
        trees = make_trees(bush, [6, 17])
        layer = make_layer(trees, 1, 2, 32, 16).to(torch.bfloat16).to(torch.float64)
        expected, states = one_by_one(layer, trees)
        pages = torch.full((len(layer.states), 3 + 2 * 32 * 16), 7.0, dtype=torch.bfloat16)
        paged = self.in_pages(pages[:, 3:])
        paged.copy_(layer.states)
        used = replace(layer.to(self.beside_bfloat16), states=paged)
        output, updates = self.run(used, trees)
        assert output.dtype == self.beside_bfloat16
        assert error(output, expected) < (4e-3 if output.dtype == torch.bfloat16 else 3e-6)
        last = trees.starts[1:] - 1
        self.commit(paged, used, updates, trees, last)
        for row, slot in zip(last.tolist(), trees.slots.tolist(), strict=True):
            assert error(paged[slot], states[row]) < 4e-3
        assert (pages[:, :3] == 7.0).all()

    def test_another_tree_gives_another_answer(self) -> None:
        """The control: nothing here is blind to parents or to what is committed."""
        trees, line = make_trees(bush, [20]), make_trees(chain, [20])
        layer = make_layer(trees, 1, 1, 16, 16).to(self.dtype)
        (output, updates), (other, _) = self.run(layer, trees), self.run(layer, line)
        assert error(other, output.double()) > 0.1
        right, wrong = layer.states.clone(), layer.states.clone()
        self.commit(right, layer, updates, trees, torch.tensor([19]))
        self.commit(wrong, layer, updates, line, torch.tensor([19]))
        assert error(wrong, right.double()) > 0.05
