# SPDX-License-Identifier: Apache-2.0
"""The device's kernels for Gated DeltaNet over trees, in Triton's interpreter, against every branch
decoded alone in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.delta_trees import (
    EPS,
    SCALE,
    DeltaSuite,
    Layer,
    branch,
    bush,
    check_spoilt,
    error,
    make_layer,
    make_trees,
    one_by_one,
)
from vllm_specplug.kernels import StateTrees
from vllm_specplug.kernels import delta_tree_triton as delta
from vllm_specplug.kernels.delta_tree import tree_conv_reference

pytestmark = pytest.mark.usefixtures("interpreter")

# A tree of three blocks of rows, trees of one, an edge of a block.
RAGGED = [1, 5, 35, 16]


def normalised(x: torch.Tensor) -> torch.Tensor:
    return (x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()).contiguous()


def run(layer: Layer, trees: StateTrees) -> tuple[torch.Tensor, torch.Tensor]:
    return delta.tree_delta_rule_triton(
        normalised(layer.query), normalised(layer.key), layer.value, layer.decays,
        layer.strengths, layer.states, trees.starts, trees.parents, trees.slots,
        max_rows=int(trees.starts.diff().max()), scale=SCALE,
    )  # fmt: skip


def commit(
    states: torch.Tensor,
    layer: Layer,
    updates: torch.Tensor,
    trees: StateTrees,
    last_rows: torch.Tensor,
    targets: torch.Tensor | None = None,
) -> None:
    delta.commit_states_triton(
        states, normalised(layer.key), updates, layer.decays, trees.parents, trees.slots,
        last_rows, targets,
    )  # fmt: skip


class TestTriton(DeltaSuite):
    ragged = RAGGED
    value_size = 16
    beside_bfloat16 = torch.float32

    run, commit = staticmethod(run), staticmethod(commit)

    def in_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """As vLLM lays them out on CUDA: values outside keys."""
        return pages.view(-1, 2, 16, 32).transpose(2, 3)

    @pytest.mark.parametrize(("key_size", "value_size"), [(72, 40), (64, 33)])
    def test_sizes_of_several_tiles(self, key_size: int, value_size: int) -> None:
        trees = make_trees(bush, [7, 18])
        self.check(trees, make_layer(trees, 1, 1, key_size, value_size))


def test_what_was_not_accepted_is_not_read() -> None:
    """A row off the path may hold anything, NaN too."""
    trees = make_trees(bush, [20])
    layer = make_layer(trees, 1, 1, 16, 16)
    _, states = one_by_one(layer, trees)
    used = layer.to(torch.float32)
    _, updates = run(used, trees)
    off = [row for row in range(20) if row not in branch(trees, 19)]
    assert off
    updates[off] = torch.nan
    after = used.states.clone()
    commit(after, used, updates, trees, torch.tensor([19]))
    assert error(after[trees.slots[0]], states[19]) < 3e-6


def test_states_written_elsewhere_or_nowhere() -> None:
    trees = make_trees(bush, [9, 4, 12])
    layer = make_layer(trees, 1, 2, 16, 16)
    _, states = one_by_one(layer, trees)
    used = layer.to(torch.float32)
    _, updates = run(used, trees)
    last = trees.starts[1:] - 1
    after = used.states.clone()
    # Slots of trees are odd.
    commit(after, used, updates, trees, last, torch.tensor([2, -1, 4]))
    for tree, slot in ((0, 2), (2, 4)):
        assert error(after[slot], states[int(last[tree])]) < 3e-6
    others = [0, 1, 3, 5, 6]
    assert torch.equal(after[others], used.states[others])


CHANNELS = pytest.mark.parametrize(
    ("channels", "width", "bias"), [(37, 4, True), (300, 4, False), (8, 2, True)]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@CHANNELS
def test_convolution_follows_ancestors(
    dtype: torch.dtype, channels: int, width: int, bias: bool
) -> None:
    torch.manual_seed(channels)
    trees = make_trees(bush, RAGGED)
    # Both of vLLM's layouts: the other one has channels outside steps.
    kept = torch.randn(2 * len(RAGGED) + 1, channels, width - 1).to(dtype).transpose(1, 2)
    rows = torch.randn(len(trees.parents), channels).to(dtype)
    weight = torch.randn(channels, width).to(dtype)
    offset = torch.randn(channels).to(dtype) if bias else None
    windows = trees.windows(width)
    inputs = torch.cat((kept[trees.slots].flatten(0, 1), rows))
    expected = tree_conv_reference(
        inputs.double(), windows, weight.double(), None if offset is None else offset.double(),
        silu=True,
    )  # fmt: skip
    for states in (kept, kept.contiguous()):
        actual = delta.tree_conv_triton(
            rows, states, trees.slots, windows, weight, offset, silu=True
        )
        assert actual.dtype == dtype
        assert error(actual, expected) < (2e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("sizes", [[1, 2, 3, 4, 30], [7, 1]])
@CHANNELS
def test_committed_inputs_are_the_last_of_the_path(
    sizes: list[int], channels: int, width: int, bias: bool
) -> None:
    torch.manual_seed(channels)
    trees = make_trees(bush, sizes)
    kept = torch.randn(2 * len(sizes) + 1, width - 1, channels)
    rows = torch.randn(len(trees.parents), channels)
    inputs = torch.cat((kept[trees.slots].flatten(0, 1), rows))
    for last in (trees.starts[:-1], trees.starts[1:] - 1):
        expected = inputs[trees.windows(width)[last, 1:]]
        after = kept.clone()
        delta.commit_conv_triton(after, rows, trees.parents, trees.slots, last)
        assert torch.equal(after[trees.slots], expected)
        targets = torch.full_like(trees.slots, -1)
        targets[0] = 0
        after = kept.clone()
        delta.commit_conv_triton(after, rows, trees.parents, trees.slots, last, targets)
        assert torch.equal(after[0], expected[0]) and torch.equal(after[1:], kept[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_rule_takes_of_the_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, key_heads, heads, k, v = 5, 2, 6, 24, 40
    mixed = torch.randn(rows, 2 * key_heads * k + heads * v).to(dtype)
    # Parts of one projection, of which some rows are trees'. Large ones take the gate's other end.
    ba = (20 * torch.randn(9, 2 * heads)).to(dtype)
    b, a = ba.chunk(2, dim=-1)
    at = torch.tensor([1, 2, 4, 7, 8])
    a_log, dt_bias = torch.randn(heads), torch.randn(heads).to(dtype)
    q, x, value = mixed.split([key_heads * k, key_heads * k, heads * v], dim=-1)
    rates = torch.nn.functional.softplus(a[at].double() + dt_bias.double())
    expected = [
        normalised(q.double().view(rows, key_heads, k)),
        normalised(x.double().view(rows, key_heads, k)),
        value.double().view(rows, heads, v),
        (-a_log.double().exp() * rates).exp(),
        b[at].double().sigmoid(),
    ]
    actual = delta.tree_inputs_triton(
        mixed, a, b, at, a_log, dt_bias, key_heads=key_heads, key_size=k, value_size=v, eps=EPS
    )
    for i, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert found.dtype == (dtype if i == 2 else torch.float32) and found.is_contiguous()
        assert error(found, wanted) < 2e-6, i


NOT_FINITE = {
    "key": lambda x, number: x["mixed"][SPOILT, 16 + 3].fill_(number),
    "value": lambda x, number: x["mixed"][SPOILT, 32 + 16 + 5].fill_(number),
    "query": lambda x, number: x["mixed"][SPOILT, 3].fill_(number),
    "decay": lambda x, number: x["a"][SPOILT, 1].fill_(number),
    "strength": lambda x, number: x["b"][SPOILT, 1].fill_(number),
    "all": lambda x, number: [part[SPOILT].fill_(number) for part in x.values()],
}
SPOILT = 3
# The first has two blocks of rows.
SPOILT_TREES = make_trees(bush, [20, 5])


def _results(part: str | None = None, number: float = 0.0) -> list[torch.Tensor]:
    """Output of the first tree's rows, and the state that each would commit; with a `part` of row
    `SPOILT` that holds `number`."""
    torch.manual_seed(0)
    trees, heads, size = SPOILT_TREES, 2, 16
    rows = len(trees.parents)
    states = torch.randn(2 * len(trees.slots) + 1, heads, size, size)
    a_log, dt_bias = torch.randn(heads), torch.randn(heads)
    inputs = {
        "mixed": torch.randn(rows, 2 * size + heads * size),
        "a": torch.randn(rows, heads), "b": torch.randn(rows, heads),
    }  # fmt: skip
    if part is not None:
        NOT_FINITE[part](inputs, number)
    query, *rest = delta.tree_inputs_triton(
        inputs["mixed"], inputs["a"], inputs["b"], torch.arange(rows), a_log, dt_bias,
        key_heads=1, key_size=size, value_size=size, eps=EPS,
    )  # fmt: skip
    output, updates = delta.tree_delta_rule_triton(
        query, *rest, states, trees.starts, trees.parents, trees.slots,
        max_rows=int(trees.starts.diff().max()), scale=SCALE,
    )  # fmt: skip
    lasts = torch.arange(20)
    after = torch.cat([states, torch.zeros(20, *states.shape[1:])])
    delta.commit_states_triton(
        after, rest[0], updates, rest[2], trees.parents, trees.slots[:1].expand(20).contiguous(),
        lasts, len(states) + lasts,
    )  # fmt: skip
    return [output, after[len(states) :]]


_clean_results = cache(_results)


@pytest.mark.parametrize(
    ("part", "number"),
    [
        *((part, float("nan")) for part in NOT_FINITE),
        # Gates of infinity are 0 and 1.
        *((part, float("inf")) for part in ("key", "value", "query")),
    ],
)
def test_what_is_not_finite_reaches_those_who_continue_it(part: str, number: float) -> None:
    """Also across blocks of rows."""
    clean, spoilt = _clean_results(), _results(part, number)
    if part == "query":
        # Only its own row changes.
        others = [row for row in range(20) if row != SPOILT]
        assert torch.equal(clean[0][others], spoilt[0][others])
        assert spoilt[0][SPOILT].isnan().all() and torch.equal(clean[1], spoilt[1])
        return
    head = slice(None) if part in ("key", "all") else slice(1, 2)
    for before, after in zip(clean, spoilt, strict=True):
        below, _ = check_spoilt(SPOILT_TREES, SPOILT, before, after)
        assert after[below][:, head].isnan().all()


def test_multiplied_as_it_is_it_reaches_other_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: inputs as the readable rule takes them."""

    def as_they_are(
        mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor,
        a_log: torch.Tensor, dt_bias: torch.Tensor, *, key_heads: int, key_size: int, **_: int,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        q, x, value = mixed.split([key_size, key_size, mixed.shape[1] - 2 * key_size], dim=-1)
        rates = a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
        return (
            normalised(q[:, None]), normalised(x[:, None]),
            value.unflatten(1, (-1, key_size)).contiguous(), (-rates).exp(), b.sigmoid(),
        )  # fmt: skip

    monkeypatch.setattr(delta, "tree_inputs_triton", as_they_are)
    clean, spoilt = _results(), _results("value", float("nan"))
    with pytest.raises(AssertionError, match="sees another branch"):
        check_spoilt(SPOILT_TREES, SPOILT, clean[0], spoilt[0])
