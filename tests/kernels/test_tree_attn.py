# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.paged import (
    PagedTrees,
    layout_of,
    num_threads,
    path_of,
    random_parents,
    write_slots,
)
from vllm_specplug.kernels import (
    AttnFeatures,
    ancestor_words,
    causal_words,
    full_words,
    reference,
    self_test,
    tree_attn,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CACHES = [(FP32, "vec"), (FP16, "vec"), (BF16, "vec"), (BF16, "vnni")]


def trees_of(specs, seed=0):
    rng = np.random.default_rng(seed)
    return [(context, random_parents(nodes, rng)) for context, nodes in specs]


def check(problem: PagedTrees, run=tree_attn, words=None, threads=1) -> None:
    if words is None:
        words = ancestor_words([p for _, p in problem.trees])
    problem.check(run, words, threads)


@pytest.mark.parametrize(
    ("dtype", "kind"), [*CACHES, (FP32, "table"), (FP16, "table"), (BF16, "table")]
)
@pytest.mark.parametrize("dense", [False, True])
def test_every_isa_matches_branches_run_as_chains(isa, dtype, kind, dense):
    layout = layout_of(kind, dtype, 32, 64)
    specs = [(0, 0), (1, 1), (31, 2), (32, 16), (33, 33), (70, 5)]
    check(PagedTrees(layout, 3, 3, trees_of(specs), dense=dense))


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
@pytest.mark.parametrize("nodes", [0, 1, 2, 30, 31, 32, 62, 63, 64, 65, 128, 256])
def test_node_counts_around_word_and_group_edges(compiled, dtype, kind, nodes):
    check(PagedTrees(layout_of(kind, dtype, 32, 32), 1, 3, trees_of([(17, nodes), (64, 3)])))
    if nodes == 256:
        check(PagedTrees(layout_of(kind, dtype, 128, 64), 1, 3, trees_of([(100, nodes)])))


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_context_lengths_around_block_edges(compiled, dtype, kind, block_size):
    edges = [0, 1, 15, 16, block_size - 1, block_size, block_size + 1, 2 * block_size - 3]
    layout = layout_of(kind, dtype, block_size, 32)
    check(PagedTrees(layout, 2, 1, trees_of([(c, 4) for c in edges])))


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_grouped_heads_and_head_sizes(compiled, dtype, kind, group_size, head_size):
    layout = layout_of(kind, dtype, 32, head_size)
    check(PagedTrees(layout, 2, group_size, trees_of([(40, 9), (0, 12)])))


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("head_size", [80, 112])
def test_blocks_of_sixteen(isa, dtype, head_size):
    """Head sizes that are no multiple of 32 come with blocks of 16 tokens."""
    layout = layout_of("vec", dtype, 16, head_size)
    check(PagedTrees(layout, 2, 4, trees_of([(0, 3), (15, 20), (47, 40)])))


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("rows", [1, 8, 33, 70])
def test_dense_blocks(compiled, dtype, kind, mask, rows):
    chain = np.arange(-1, rows - 2, dtype=np.int32)
    trees = [(c, chain) for c in (0, 1, 40, 64)]
    problem = PagedTrees(layout_of(kind, dtype, 64, 64), 2, 3, trees, dense=True, dense_mask=mask)
    words = (causal_words if mask == "causal" else full_words)([rows] * len(trees))
    check(problem, words=words)


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_shares_of_a_split_context_are_merged(compiled, dtype, kind, threads):
    layout = layout_of(kind, dtype, 32, 64)
    check(PagedTrees(layout, 3, 3, trees_of([(900, 12)])), threads=threads)
    specs = [(3, 1), (700, 70), (0, 0), (260, 7)]
    check(PagedTrees(layout, 2, 4, trees_of(specs)), threads=threads)
    # More rows x heads than one pass over the context takes; the tail's groups fall to a thread
    # without context.
    small = layout_of(kind, dtype, 32, 32)
    check(PagedTrees(small, 1, 16, trees_of([(33, 130)])), threads=threads)
    check(PagedTrees(layout, 1, 8, trees_of([(64, 200)])), threads=threads)


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
def test_shared_prefix_blocks(compiled, dtype, kind):
    problem = PagedTrees(layout_of(kind, dtype, 32, 32), 2, 3, trees_of([(64, 6), (70, 9)]))
    problem.block_table[2, :2] = problem.block_table[1, :2]
    problem.keys[1][:64] = problem.keys[0][:64]
    problem.values[1][:64] = problem.values[0][:64]
    check(problem)


def test_query_slices_of_a_fused_projection(compiled):
    """The query's rows need not be contiguous."""
    problem = PagedTrees(layout_of("vnni", BF16, 32, 64), 3, 3, trees_of([(40, 8)]))
    fused = torch.full((problem.query.shape[0], 15, 64), float("nan"), dtype=BF16)
    fused[:, :9] = problem.query
    problem.query = fused[:, :9]
    check(problem)


def _outputs(problem: PagedTrees, **more) -> torch.Tensor:
    output = torch.zeros_like(problem.query)
    words = ancestor_words([parents for _, parents in problem.trees])
    views = problem.layout.views(problem.cache)
    meta = problem.metadata(words)
    tree_attn(problem.query, *views, output, meta, problem.scale, problem.layout, **more)
    return output


@pytest.mark.parametrize("head_size", [32, 64, 96, 128])
@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_rows_that_are_not_packed_give_the_same_numbers(compiled, group_size, head_size):
    """Words made on the way to the registers are summed in the order of packed ones. Windows wider
    than any context change nothing but that the cache is packed."""
    specs = [(0, 0), (0, 1), (31, 0), (33, 1), (300, 2), (257, 40), (64, 130)]
    chains = [(context, np.arange(-1, nodes - 1, dtype=np.int32)) for context, nodes in specs]
    problem = PagedTrees(layout_of("vec", BF16, 64, head_size), 2, group_size, chains)
    packed = _outputs(problem, features=AttnFeatures(window=1 << 20))
    assert packed.isfinite().all() and packed.abs().sum() > 0
    assert torch.equal(_outputs(problem), packed)


def _alone(problem: PagedTrees, r: int) -> PagedTrees:
    """Every row of a tree as a request of one row, its ancestors in the cache in a line."""
    context, parents = problem.trees[r]
    paths = [path_of(parents, row) for row in range(len(parents) + 1)]
    made = PagedTrees(
        problem.layout, problem.num_kv_heads, problem.group_size,
        [(context + len(path) - 1, np.empty(0, np.int32)) for path in paths],
        features=problem.features,
    )  # fmt: skip
    for row, path in enumerate(paths):
        chain = [*range(context), *(context + j for j in path)]
        key, value = problem.keys[r][chain], problem.values[r][chain]
        write_slots(made.layout, made.cache, made.slots(row, len(chain)), key, value)
        made.query[made.row_start[row]] = problem.query[problem.row_start[r] + row]
    return made


IN_ORDER = ("avx2", "avx512_bf16")
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
    layout = layout_of("vec", BF16, 32, 64)
    problem = PagedTrees(layout, 2, 3, trees_of([spec, (90, 7)], seed=2), features=features)
    alone = _alone(problem, 0)
    first, count = problem.row_start[0], problem.rows[0]
    expected = _outputs(alone, features=features)[alone.row_start]
    outputs = []
    for threads in (1, 2, 5):
        with num_threads(threads):
            outputs.append(_outputs(problem, features=features))
    assert torch.equal(outputs[0][first : first + count], expected)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_in_the_order_of_slots_a_row_is_another_one(isa):
    """Otherwise the test above would show nothing."""
    if isa not in IN_ORDER:
        pytest.skip(f"{isa} packs its words")
    layout = layout_of("vec", BF16, 32, 64)
    problem = PagedTrees(layout, 2, 3, trees_of([(249, 60)]))
    alone = _alone(problem, 0)
    # Windows wider than any context change nothing but that the cache is packed.
    packed = _outputs(problem, features=AttnFeatures(window=1 << 20))
    assert not torch.equal(problem.tree_rows(packed), _outputs(alone)[alone.row_start])
    assert torch.equal(problem.tree_rows(_outputs(problem)), _outputs(alone)[alone.row_start])


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
def test_threads_do_not_change_a_number(compiled, dtype, kind):
    problem = PagedTrees(layout_of(kind, dtype, 32, 64), 3, 2, trees_of([(13_000, 20), (700, 0)]))
    alone = _outputs(problem)
    for threads in (2, 3, 8):
        with num_threads(threads):
            assert torch.equal(_outputs(problem), alone)


def test_scores_that_grow_along_the_context(compiled):
    """The running maximum moves in every tile, by far more than the rescaling threshold."""
    problem = PagedTrees(layout_of("vec", FP32, 32, 32), 1, 1, trees_of([(1200, 3)]))
    ramp = torch.linspace(0.0, 40.0, 1204).view(-1, 1, 1)
    problem.query = problem.query.abs()
    problem.keys[0] = problem.keys[0].abs() * ramp
    write_slots(
        problem.layout, problem.cache, problem.slots(0, 1204), problem.keys[0], problem.values[0]
    )
    check(problem)


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
@pytest.mark.parametrize("dense", [False, True])
def test_reference_matches_the_same_oracle(dtype, kind, dense):
    layout = layout_of(kind, dtype, 32, 32)
    problem = PagedTrees(layout, 2, 3, trees_of([(0, 0), (31, 20), (64, 66)]), dense=dense)
    check(problem, run=reference.tree_attn_reference)


def test_oracle_catches_a_wrong_mask(compiled):
    """Were the mask ignored, the check above would fail."""
    problem = PagedTrees(layout_of("vec", FP32, 32, 64), 1, 3, trees_of([(5, 8)]))
    with pytest.raises(AssertionError, match="off by"):
        check(problem, words=causal_words([9]))


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_random_batches(data):
    dtype, kind = data.draw(st.sampled_from([*CACHES, (FP32, "table")]))
    threads = data.draw(st.sampled_from([1, 2, 4]))
    specs = data.draw(
        st.lists(st.tuples(st.integers(0, 330), st.integers(0, 80)), min_size=1, max_size=4)
    )
    problem = PagedTrees(
        layout_of(kind, dtype, data.draw(st.sampled_from([32, 64])), 32),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 5)),
        trees_of(specs, seed=data.draw(st.integers(0, 99))),
        dense=data.draw(st.booleans()),
        gap=data.draw(st.integers(0, 3)),
    )
    check(problem, threads=threads)


class TestRefusals:
    """Metadata that would read foreign memory is refused."""

    def run(self, change, **tail):
        problem = PagedTrees(layout_of("vec", FP32, 32, 32), 1, 2, trees_of([(40, 4)]))
        meta = problem.metadata(ancestor_words([p for _, p in problem.trees]))
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
