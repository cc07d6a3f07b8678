# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_suite import DenseSuite
from tests.kernels.paged import PagedTrees, paged_trees
from tests.kernels.tree_problem import path_of
from vllm_specplug.kernels import AttnFeatures, reference, self_test, tree_attn

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CACHES = [(FP32, "vec"), (FP16, "vec"), (BF16, "vec"), (BF16, "vnni")]


@pytest.mark.usefixtures("compiled")
class TestTrees(DenseSuite):
    """Splits of a context are threads here."""

    @pytest.fixture(autouse=True, params=CACHES, ids=str)
    def _cache(self, request: pytest.FixtureRequest) -> None:
        self.cache = request.param

    def problem(self, specs, **options) -> PagedTrees:
        return paged_trees(specs, self.cache, **options)


@pytest.mark.parametrize(
    ("dtype", "kind"), [*CACHES, (FP32, "table"), (FP16, "table"), (BF16, "table")]
)
@pytest.mark.parametrize("dense", [False, True])
def test_every_isa_matches_branches_run_as_chains(isa, dtype, kind, dense):
    specs = [(0, 0), (1, 1), (31, 2), (32, 16), (33, 33), (70, 5)]
    paged_trees(specs, (dtype, kind), head=64, kv_heads=3, group=3, dense=dense).check()


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_grouped_heads_and_head_sizes(compiled, dtype, kind, group_size, head_size):
    paged_trees([(40, 9), (0, 12)], (dtype, kind), head=head_size, group=group_size).check()


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("head_size", [80, 112])
def test_blocks_of_sixteen(isa, dtype, head_size):
    """Head sizes that are no multiple of 32 come with blocks of 16 tokens."""
    specs = [(0, 3), (15, 20), (47, 40)]
    paged_trees(specs, (dtype, "vec"), page=16, head=head_size, group=4).check()


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_shares_of_a_split_context_are_merged(compiled, dtype, kind, threads):
    for specs, sizes in (
        ([(900, 12)], {"kv_heads": 3, "group": 3}),
        ([(3, 1), (700, 70), (0, 0), (260, 7)], {"group": 4}),
        # More rows x heads than one pass over the context takes; the tail's groups fall to a
        # thread without context.
        ([(33, 130)], {"kv_heads": 1, "group": 16, "head": 32}),
        ([(64, 200)], {"kv_heads": 1, "group": 8}),
    ):
        paged_trees(specs, (dtype, kind), **{"head": 64, **sizes}).check(splits=threads)


@pytest.mark.parametrize("head_size", [32, 64, 96, 128])
@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_rows_that_are_not_packed_give_the_same_numbers(compiled, group_size, head_size):
    """Words made on the way to the registers are summed in the order of packed ones. Windows wider
    than any context change nothing but that the cache is packed."""
    specs = [(0, 0), (0, 1), (31, 0), (33, 1), (300, 2), (257, 40), (64, 130)]
    sizes = {"page": 64, "head": head_size, "group": group_size}
    problem = paged_trees(specs, (BF16, "vec"), mask="causal", **sizes)
    packed = problem.answer(features=AttnFeatures(window=1 << 20))
    assert packed.isfinite().all() and packed.std() > 0
    assert torch.equal(problem.answer(), packed)


def _alone(problem: PagedTrees, r: int) -> PagedTrees:
    """Every row of a tree as a request of one row, its ancestors in the cache in a line."""
    context, parents = problem.contexts[r], problem.parents[r]
    paths = [path_of(parents, row) for row in range(len(parents) + 1)]
    made = PagedTrees(
        problem.layout, problem.kv_heads, problem.group,
        [(context + len(path) - 1, np.empty(0, np.int32)) for path in paths],
        features=problem.features,
    )  # fmt: skip
    for row, path in enumerate(paths):
        chain = [*range(context), *(context + j for j in path)]
        key, value = problem.keys[r][chain], problem.values[r][chain]
        made.store(made.slots(row, len(chain)), key, value)
        made.query[made.starts[row]] = problem.query[problem.starts[r] + row]
    return made


IN_ORDER = ("avx2", "avx512", "avx512_bf16")
"""Instruction sets whose kernels read a bfloat16 cache in place."""


@pytest.mark.parametrize("kind", ["plain", "soft cap", "slopes", "sinks"])
@pytest.mark.parametrize(
    "spec", [(0, 9), (1, 30), (33, 16), (250, 40), (511, 12), (1015, 70), (8187, 9)]
)
def test_a_row_is_the_same_number_by_number_in_a_tree_and_alone(isa, spec, kind):
    """A bfloat16 text does not depend on what is drafted for it. Contexts end before a group, a
    tile and a unit, which trees go beyond."""
    if isa not in IN_ORDER:
        pytest.skip(f"{isa} packs its words")
    features = {
        "plain": AttnFeatures(),
        "soft cap": AttnFeatures(soft_cap=3.0),
        "slopes": AttnFeatures(alibi_slopes=torch.linspace(0.01, 0.3, 6)),
        "sinks": AttnFeatures(sinks=torch.linspace(-1, 2, 6)),
    }[kind]
    specs, sizes = [spec, (90, 7)], {"head": 64, "group": 3}
    problem = paged_trees(specs, (BF16, "vec"), seed=2, features=features, **sizes)
    alone = _alone(problem, 0)
    first, count = problem.starts[0], problem.rows[0]
    expected = alone.answer()[alone.starts]
    outputs = [problem.answer(splits=threads) for threads in (1, 2, 5)]
    assert torch.equal(outputs[0][first : first + count], expected)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_in_the_order_of_slots_a_row_is_another_one(isa):
    """Otherwise the test above would show nothing."""
    if isa not in IN_ORDER:
        pytest.skip(f"{isa} packs its words")
    num_different = 0
    for seed in range(8):
        problem = paged_trees([(249, 60)], (BF16, "vec"), seed=seed, head=64, group=3)
        alone = _alone(problem, 0)
        expected = alone.answer()[alone.starts]
        assert torch.equal(problem.tree_rows(problem.answer())[0], expected)
        # Windows wider than any context change nothing but that the cache is packed.
        packed = problem.answer(features=AttnFeatures(window=1 << 20))
        num_different += int((problem.tree_rows(packed)[0] != expected).sum())
    assert num_different


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
def test_threads_do_not_change_a_number(compiled, dtype, kind):
    problem = paged_trees([(13_000, 20), (700, 0)], (dtype, kind), head=64, kv_heads=3)
    alone = problem.answer()
    for threads in (2, 3, 8):
        assert torch.equal(problem.answer(splits=threads), alone)


def test_scores_that_grow_along_the_context(compiled):
    """The running maximum moves in every tile, by far more than the rescaling threshold."""
    problem = paged_trees([(1200, 3)], kv_heads=1, group=1)
    ramp = torch.linspace(0.0, 40.0, 1204).view(-1, 1, 1)
    problem.query = problem.query.abs()
    problem.keys[0] = problem.keys[0].abs() * ramp
    problem.fill(0, 1204)
    problem.limits = {FP32: 1e-3}
    problem.check()


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
@pytest.mark.parametrize("dense", [False, True])
def test_reference_matches_the_same_oracle(dtype, kind, dense):
    problem = paged_trees([(0, 0), (31, 20), (64, 66)], (dtype, kind), group=3, dense=dense)
    problem.check(kernel=reference.tree_attn_reference)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_random_batches(data):
    dtype, kind = data.draw(st.sampled_from([*CACHES, (FP32, "table")]))
    threads = data.draw(st.sampled_from([1, 2, 4]))
    specs = data.draw(
        st.lists(st.tuples(st.integers(0, 330), st.integers(0, 80)), min_size=1, max_size=4)
    )
    problem = paged_trees(
        specs, (dtype, kind),
        page=data.draw(st.sampled_from([32, 64])),
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 5)),
        seed=data.draw(st.integers(0, 99)),
        dense=data.draw(st.booleans()),
        gap=data.draw(st.integers(0, 3)),
    )  # fmt: skip
    problem.check(splits=threads)


class TestRefusals:
    """Metadata that would read foreign memory is refused."""

    def run(self, change, **tail):
        problem = paged_trees([(40, 4)], kv_heads=1)
        meta = problem.metadata()
        change(meta)
        output = torch.zeros_like(problem.query)
        views = problem.layout.views(problem.cache)
        with pytest.raises(RuntimeError, match=r"tree_attn: (tree 0 does not fit|block)"):
            tree_attn(problem.query, *views, output, meta, 1.0, problem.layout, **tail)
        assert not output.any()

    @pytest.mark.parametrize(
        ("field", "value"), [(0, 5), (0, -1), (1, 99), (2, 40), (2, 0), (3, 99), (3, -1), (4, 9)]
    )
    def test_out_of_range(self, compiled, field, value):
        self.run(lambda meta: meta.plan.__setitem__((field, 0), value))

    def test_block_outside_the_cache(self, compiled):
        self.run(lambda meta: meta.block_table.__setitem__((1, 1), 99))

    def test_short_tail(self, compiled):
        tail = torch.zeros(3, 1, 32)
        self.run(lambda meta: None, tail_key=tail, tail_value=tail)


def test_self_test_passes_and_names_both_dtypes():
    message = self_test()
    assert "float32" in message
    assert "bfloat16" in message
