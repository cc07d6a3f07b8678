# SPDX-License-Identifier: Apache-2.0
"""Windows, soft caps, sinks and ALiBi of tree rows: every branch as a chain that has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.paged import PagedTrees, layout_of, random_parents
from vllm_specplug.kernels import AttnFeatures, ancestor_words, reference, tree_attn

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CACHES = [(FP32, "vec"), (FP16, "vec"), (BF16, "vec"), (BF16, "vnni"), (FP32, "table")]
KV_HEADS, GROUP = 2, 3
HEADS = KV_HEADS * GROUP


def per_head(seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(HEADS, generator=torch.Generator().manual_seed(seed)) * scale


FEATURES = {
    "window": AttnFeatures(window=40),
    "window of one": AttnFeatures(window=1),
    "window of three": AttnFeatures(window=3),
    "soft cap": AttnFeatures(soft_cap=0.7),
    "wide soft cap": AttnFeatures(soft_cap=50.0),
    "sinks": AttnFeatures(sinks=per_head()),
    "far sinks": AttnFeatures(sinks=torch.tensor([-90.0, 90.0, -1e30, 40.0, 0.0, -40.0])),
    "alibi": AttnFeatures(alibi_slopes=per_head(1, 0.1).abs()),
    "all": AttnFeatures(
        window=37, soft_cap=1.5, sinks=per_head(2), alibi_slopes=per_head(3, 0.1).abs()
    ),
}
SPECS = [(0, 0), (31, 2), (39, 9), (41, 33), (100, 5)]


def trees(specs=SPECS, seed=0):
    rng = np.random.default_rng(seed)
    return [(context, random_parents(nodes, rng)) for context, nodes in specs]


def problem(features, dtype=FP32, kind="vec", block=32, head=32, specs=SPECS, **rest):
    layout = layout_of(kind, dtype, block, head)
    return PagedTrees(layout, KV_HEADS, GROUP, trees(specs), features=features, **rest)


def check(made: PagedTrees, run=tree_attn, threads: int = 1) -> None:
    made.check(run, ancestor_words([p for _, p in made.trees]), threads)


@pytest.mark.parametrize("name", FEATURES)
def test_every_isa_matches_branches_run_as_chains(isa, name):
    for dtype, kind in CACHES:
        check(problem(FEATURES[name], dtype, kind))


@pytest.mark.parametrize("name", FEATURES)
def test_reference_matches_the_same_oracle(name):
    for dense in (False, True):
        made = problem(FEATURES[name], specs=[(0, 0), (45, 9), (70, 5)], dense=dense)
        check(made, run=reference.tree_attn_reference)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("threads", [2, 4])
def test_shares_of_a_split_context_are_merged(compiled, name, threads):
    check(problem(FEATURES[name], specs=[(900, 12), (3, 1), (0, 0), (260, 7)]), threads=threads)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_dense_tails_and_blocks_of_sixteen(compiled, name, dtype):
    """Half of a group of slots may be another request's."""
    specs = [(c, 5) for c in (0, 15, 16, 17, 40, 55, 56, 57, 71, 72)]
    for dense in (False, True):
        check(problem(FEATURES[name], dtype, block=16, head=80, specs=specs, dense=dense))


@pytest.mark.parametrize(("dtype", "kind"), CACHES)
def test_every_window_around_block_and_tree_edges(compiled, dtype, kind):
    for window in (2, 31, 32, 33, 64, 65, 70, 71, 2**31):
        check(problem(AttnFeatures(window=window), dtype, kind, specs=[(64, 6), (70, 12)]))


def test_a_deep_chain_outgrows_the_window(compiled):
    """The window cuts into the tree itself, beyond the first word of its mask."""
    chain = np.arange(-1, 99, dtype=np.int32)
    layout = layout_of("vec", FP32, 32, 32)
    for window in (1, 64, 65, 99):
        made = PagedTrees(
            layout, KV_HEADS, GROUP, [(50, chain)], features=AttnFeatures(window=window)
        )
        check(made)


@pytest.mark.parametrize("change", [
    {"window": 0}, {"window": 39}, {"window": 41}, {"soft_cap": 0.0}, {"sinks": None},
    {"alibi_slopes": None},
])  # fmt: skip
def test_the_oracle_notices_a_feature_left_out(compiled, change):
    features = AttnFeatures(
        window=40, soft_cap=1.5, sinks=per_head(), alibi_slopes=per_head(1, 0.1).abs()
    )
    made = problem(features, specs=[(30, 12), (70, 12)])
    other = replace(features, **change)
    # As plainly written as the kernel's caller would have it; the table is whole again.
    made.block_table[1:] = problem(AttnFeatures(), specs=[(30, 12), (70, 12)]).block_table[1:]
    made.features = other
    check(made)
    made.features = features

    def run(*args, **kwargs):
        tree_attn(*args, **{**kwargs, "features": other})

    with pytest.raises(AssertionError, match="off by|unused slot"):
        check(made, run)


def test_the_oracle_notices_a_window_from_the_slot(compiled, monkeypatch):
    """A row's lower bound follows its depth: counted from its slot, siblings would push it."""
    made = problem(AttnFeatures(window=40), specs=[(70, 12)])

    def run(query, keys, values, output, meta, scale, layout, features):
        # Each row alone, as a tree of its own whose context ends at its slot.
        for i in range(13):
            low = 70 + i - features.window + 1
            mask = torch.zeros(1, 83, dtype=torch.bool)
            mask[0, low:70] = True
            mask[0, [70 + j for j in made.attended(0, i)]] = True
            mask[0, :low] = False
            row = made.row_start[0] + i
            out, _ = reference.dense_attention(
                query[row : row + 1], made.keys[0], made.values[0], scale, GROUP, mask
            )
            output[row] = out[0]

    with pytest.raises(AssertionError, match="off by"):
        check(made, run)


def test_a_table_entry_inside_the_window_must_exist(compiled):
    made = problem(AttnFeatures(window=40), specs=[(70, 4)])
    made.block_table[1, 1] = 10**9
    with pytest.raises(RuntimeError, match="outside the cache"):
        check(made)


def test_sinks_of_other_heads_are_refused(compiled):
    made = problem(AttnFeatures(sinks=torch.zeros(HEADS + 1)), specs=[(3, 1)])
    made.expected = lambda: None
    with pytest.raises(RuntimeError, match=r"sinks must be \[Hq\]"):
        check(made)
