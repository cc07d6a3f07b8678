# SPDX-License-Identifier: Apache-2.0
"""The PTX that Triton makes of the kernels, stepped on the CPU, against the tests' own oracles.

Wrappers, variants and arguments are those of a launch; the compiler is the Triton that is
installed. The machine poisons what nobody wrote and notices races in shared memory; see
`ptx_machine` for what it cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import (
    test_delta_tree_triton as delta,
)
from tests.kernels import (
    test_finite_values_triton as finite,
)
from tests.kernels import (
    test_gru_step_triton as gru,
)
from tests.kernels import (
    test_ngram_lookup_triton as ngrams,
)
from tests.kernels import (
    test_partial_cache_triton as partial_caches,
)
from tests.kernels import (
    test_row_ops_triton as row_ops,
)
from tests.kernels import (
    test_step_tables_triton as step_tables,
)
from tests.kernels import (
    test_step_trees_triton as step_trees,
)
from tests.kernels import (
    test_token_scales as tokens,
)
from tests.kernels import (
    test_tree_attn_flash as flash,
)
from tests.kernels import (
    test_triton_step as step,
)
from tests.kernels.device_trees import FP8, FP16, FP32, DeviceTrees, other_scales
from tests.kernels.latent_trees import LatentTrees
from tests.ptx.ptx_machine import Timing
from tests.ptx.triton_compiler import Compiler
from tests.ptx.triton_machine import Stepped, stepped
from vllm_specplug.kernels import AttnFeatures

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.xdist_group("triton_ptx")]

BF16 = torch.bfloat16
LATE = Timing(eager_copies=False, eager_products=True)
EARLY = Timing(eager_copies=True, eager_products=False, reverse_warpgroups=True)
ARCHS = (80, 90)
PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async"}
SMOKE = pytest.mark.parametrize(
    "machine", [80, pytest.param(90, marks=pytest.mark.smoke)], indirect=True
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.close()


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def machine(
    request: pytest.FixtureRequest, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stepped]:
    with stepped(monkeypatch, compiler, request.param, LATE) as record:
        yield record


def ran(machine: Stepped, fragment: str) -> int:
    return sum(count for opcode, count in machine.counts.items() if fragment in opcode)


def half(specs: list[tuple[int, int]], **options: Any) -> DeviceTrees:
    return DeviceTrees(specs, **{"dtype": BF16, "head_dim": 64, **options})


def latent(specs: list[tuple[int, int]], **options: Any) -> LatentTrees:
    return LatentTrees(specs, **{"dtype": BF16, "heads": 4, "latent": 64, **options})


# -- attention -----------------------------------------------------------------------------


@SMOKE
def test_context_and_tree_in_one_pass(machine: Stepped) -> None:
    half([(70, 9), (3, 0), (64, 5), (0, 1)]).check(splits=1)
    assert ran(machine, PRODUCTS[machine.arch]) and ran(machine, "cp.async.c")
    assert machine.kernels == {"_tree_words_kernel": 1, "_tree_attn_kernel": 1}


@pytest.mark.parametrize("nodes", [0, 62, 63, 64, 65])
def test_node_counts_around_word_edges(machine: Stepped, nodes: int) -> None:
    half([(19, nodes)], group=1).check(splits=1)


@SMOKE
def test_splits_are_merged(machine: Stepped) -> None:
    half([(600, 9), (3, 0), (300, 2)]).check(splits=2, skipped=1)
    assert machine.kernels["_merge_parts_kernel"] == 1


def test_copies_early_and_products_late(machine: Stepped) -> None:
    machine.timing = EARLY
    half([(330, 40)], head_dim=128).check(splits=1)


def test_dense_tails(machine: Stepped) -> None:
    half([(40, 20), (0, 3)], dense=True).check(splits=1)
    half([(40, 20), (0, 3)], dense=True, mask="full").check(splits=1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_of_float32(machine: Stepped, head_dim: int) -> None:
    """By lanes, exactly: factors rounded as tensor cores do are off."""
    problem = half([(37, 9), (3, 0)], dtype=FP32, head_dim=head_dim)
    problem.check(splits=1)
    assert not ran(machine, "mma") and ran(machine, "cp.async.c")
    keys = problem.key_cache.clone()
    problem.key_cache.view(torch.int32).bitwise_and_(-(1 << 13))
    with pytest.raises(AssertionError, match="off by"):
        problem.check(splits=1)
    problem.key_cache.copy_(keys)
    machine.damage = lambda ptx: re.sub(r"cp\.async\.wait_group\s+\d+;", "", ptx)
    with pytest.raises(AssertionError, match="what a copy brings, without a wait"):
        problem.check(splits=1)


def test_wide_heads(machine: Stepped) -> None:
    half([(40, 5), (3, 0)], head_dim=512).check(splits=1)


HEADS = torch.tensor([1.5, -2.0])
FEATURES = {
    "window, sinks and soft cap": AttnFeatures(window=33, sinks=HEADS, soft_cap=1.1),
    "alibi": AttnFeatures(alibi_slopes=torch.tensor([0.1, 0.03])),
    "8-bit cache": AttnFeatures(
        key_scales=torch.tensor(0.37),
        value_scales=torch.tensor([1.3]),
        query_scales=torch.tensor(0.3),
    ),
}


@pytest.mark.parametrize("kind", [torch.int8, FP8], ids=["int8", "e4m3"])
def test_scales_of_each_token(machine: Stepped, kind: torch.dtype) -> None:
    if kind == FP8 and machine.arch < 89:
        pytest.skip("e4m3 needs compute capability 8.9")
    # Whole tiles and parts of one, over pages of several slots.
    made = half([(70, 20), (5, 3)], kv_heads=2, token_scales=kind)
    made.check(splits=1)
    assert ran(machine, "cp.async.c"), "bytes are read one by one"
    for which in ("key_scales", "value_scales"):
        scales = getattr(made.features, which)
        for other in (1.0, scales.nan_to_num(0.01).roll(1, 1)):
            features = replace(made.features, **{which: other_scales(scales, other)})
            with pytest.raises(AssertionError, match="off by"):
                made.check(splits=1, features=features)


@pytest.mark.parametrize("name", FEATURES)
def test_what_layers_have(machine: Stepped, name: str) -> None:
    features = FEATURES[name]
    if features.key_scales is not None and machine.arch < 89:
        pytest.skip("e4m3 needs compute capability 8.9")
    specs = [(70, 20), (5, 3)]
    half(specs, features=features).check(splits=1)
    left_out = AttnFeatures(key_scales=features.key_scales, value_scales=features.value_scales)
    if features.key_scales is None:
        with pytest.raises(AssertionError, match=r"off by|unused slot|wild"):
            half(specs, features=features).check(splits=1, features=left_out)


def test_the_tree_behind_flash_attention(machine: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = half([(40, 20), (0, 9), (17, 0)])
    attention = flash.Attention(next(iter(flash.EMPTY)))
    output = flash.run(problem, monkeypatch, attention)
    assert (output - torch.cat(problem.expected())).abs().max() < 1.6e-2


@pytest.mark.parametrize("timing", [LATE, EARLY], ids=["late", "early"])
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 128, "group": 4},
        {"head_dim": 96, "group": 3, "kv_heads": 2, "dtype": FP16},
        {"head_dim": 256, "group": 3, "dtype": FP16},
        {"head_dim": 256, "dense": True},
        {"head_dim": 128, "group": 8, "page": 128},
        {"head_dim": 80, "group": 1, "kv_heads": 2},
        {"head_dim": 64, "group": 1, "page": 32},
    ],
    ids=lambda options: "-".join(f"{k}{v}" for k, v in options.items()),
)
def test_shapes_of_heads_and_pages(
    machine: Stepped, timing: Timing, options: dict[str, Any]
) -> None:
    machine.timing = timing
    half([(200, 66), (64, 3), (0, 9)], **options).check(splits=1)


def test_the_largest_tree(machine: Stepped) -> None:
    half([(20, 256), (700, 100)], group=4).check(splits=2)


def test_a_wrong_mask_is_noticed(machine: Stepped) -> None:
    problem = half([(5, 8)])
    problem.parent_rows = lambda: torch.arange(-1, 8).int()
    with pytest.raises(AssertionError, match="off by"):
        problem.check()


@pytest.mark.parametrize("pattern", [r"cp\.async\.wait_group\s+\d+;", r"bar\.sync\s+0;"])
def test_missing_synchronisation_is_noticed(machine: Stepped, pattern: str) -> None:
    def damaged(ptx: str) -> str:
        if "_tree_attn_kernel" not in ptx:
            return ptx
        less, count = re.subn(pattern, "", ptx)
        assert count, "the kernel has no such instruction"
        return less

    machine.damage = damaged
    with pytest.raises(AssertionError, match="without a (wait and a )?barrier"):
        half([(300, 8)], group=10).check(splits=1)


# -- the rest of a step ---------------------------------------------------------------------


def of_rows(check: Callable[..., None], *case: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A case of `row_ops`, with the kernels."""

    def run(patch: pytest.MonkeyPatch) -> None:
        row_ops.use_kernels(patch)
        check(*case)

    return run


STEPS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = {
    "best-first trees": (
        lambda patch: step.assert_same_trees(
            *step.candidates(3, 5, 4, seed=3), [9, 1, 0], [5, 4, 3], 4, 9
        ),
        {"_build_best_first_kernel"},
    ),
    "ties of best-first trees": (
        lambda patch: step.test_ties_break_as_in_the_python_builder(),
        {"_build_best_first_kernel"},
    ),
    "the walk": (
        lambda patch: step_trees.compare_walks(step_trees.switch(patch), 9, 7),
        {"_walk_kernel", "_commit_kernel"},
    ),
    "trees that are kept": (
        lambda patch: step_trees.compare_puts(step_trees.switch(patch), 20, 8),
        {"_put_kernel"},
    ),
    "trees of a step": (
        lambda patch: step_trees.compare_steps(step_trees.switch(patch), 9, 6),
        {"_attach_kernel", "_positions_kernel", "_plan_kernel"},
    ),
    "a step for the host": (
        lambda patch: step_tables.compare_step_tables(step_trees.switch(patch), 16, 7),
        {"_step_table_kernel"},
    ),
    "trees for the host": (
        lambda patch: step_tables.compare_trees_tables(step_trees.switch(patch), 16, 23),
        {"_trees_table_kernel"},
    ),
    "what drafts begin with": (
        lambda patch: step_tables.compare_draft_inputs(step_trees.switch(patch), 4, 7),
        {"_draft_inputs_kernel"},
    ),
    "compaction": (
        lambda patch: step.test_compaction_gathers_every_layers_paths(BF16),
        {"_compact_paths_kernel"},
    ),
    "n-gram branches": (
        lambda patch: ngrams.test_branches_are_those_of_the_host(2, 1, 5, patch),
        {"_scan_kernel", "_branches_kernel"},
    ),
    "merged trees": (
        lambda patch: ngrams.test_merged_trees_are_those_of_the_host(True, 9, 1),
        {"_scan_kernel", "_branches_kernel", "_build_best_first_kernel", "_merge_kernel"},
    ),
    "a local head's step": (
        lambda patch: gru.test_new_states_equal_the_readable_step(None, 70, 5, FP16),
        {"_gru_step_kernel"},
    ),
    "the delta rule": (
        lambda patch: delta.test_every_branch_is_decoded_as_alone("bush", (1, 2)),
        {"_tree_products_kernel", "_tree_solve_kernel", "_commit_states_kernel"},
    ),
    "the delta rule over pages": (
        lambda patch: delta.test_states_in_pages_in_bfloat16_and_with_values_outside_keys(),
        {"_tree_products_kernel", "_tree_solve_kernel", "_commit_states_kernel"},
    ),
    "the delta rule's inputs": (
        lambda patch: delta.test_what_the_rule_takes_of_the_rows(BF16),
        {"_tree_inputs_kernel"},
    ),
    "the delta rule beside what is not finite": (
        lambda patch: delta.test_what_is_not_finite_reaches_those_who_continue_it(
            "value", float("inf")
        ),
        {
            "_tree_inputs_kernel",
            "_tree_products_kernel",
            "_tree_solve_kernel",
            "_commit_states_kernel",
        },
    ),
    "scales of tokens that are not finite": (
        lambda patch: tokens.test_what_stays_of_a_token_that_is_not_finite(FP8),
        {"_isolate_token_scales_kernel"},
    ),
    "scores of keys": (
        lambda patch: partial_caches.test_scores_are_those_of_torch(partial_caches.HALF),
        {"_score_keys_kernel"},
    ),
    "chosen tokens": (
        lambda patch: partial_caches.test_chosen_tokens_arrive(BF16),
        {"_gather_chosen_kernel"},
    ),
    "tokens taken in": (
        lambda patch: partial_caches.test_new_tokens_are_taken_in(BF16),
        {"_append_to_tail_kernel"},
    ),
    "tokens counted": (
        lambda patch: partial_caches.test_tokens_that_are_taken_in_are_counted(),
        {"_count_tokens_kernel"},
    ),
    "latent rows": (
        lambda patch: latent([(70, 9), (3, 0), (64, 5)]).check(splits=1),
        {"_latent_attn_kernel"},
    ),
    "latent rows in parts": (
        lambda patch: latent([(600, 9), (3, 0)]).check(splits=2, skipped=1),
        {"_latent_attn_kernel", "_merge_parts_kernel"},
    ),
    "latent rows of DeepSeek's": (
        lambda patch: latent([(70, 2)], heads=16, latent=512, rotary=64, page=64).check(splits=1),
        {"_latent_attn_kernel"},
    ),
    "values that are not finite": (
        lambda patch: finite.test_the_devices_kernel_stores_what_the_hosts_does(FP16, float("nan")),
        {"_isolate_nonfinite_kernel"},
    ),
    "values that are infinite": (
        lambda patch: finite.test_the_devices_kernel_stores_what_the_hosts_does(
            BF16, float("-inf")
        ),
        {"_isolate_nonfinite_kernel"},
    ),
    "what is stored": (
        lambda patch: finite.test_stored_at_once_as_by_two_kernels(BF16, float("nan"), 3, 128),
        {"_store_isolated_kernel"},
    ),
    "the convolution": (
        lambda patch: delta.test_convolution_follows_ancestors(BF16, 37, 4, True),
        {"_tree_conv_kernel"},
    ),
    "the convolution's commit": (
        lambda patch: delta.test_committed_inputs_are_the_last_of_the_path([7, 1], 37, 4, True),
        {"_commit_conv_kernel"},
    ),
    "norms of rows": (of_rows(row_ops.test_norms, FP32, 2, 1030), {"_norm_rows_kernel"}),
    "normed and rotated heads": (
        of_rows(row_ops.test_heads, BF16, 4, 5, 128, 32),
        {"_norm_rotate_kernel"},
    ),
    "gates": (of_rows(row_ops.test_gates, BF16, 2, 1030), {"_gated_silu_kernel"}),
}


# All kernels of these run in other cases too.
REPEATED = {
    "latent rows of DeepSeek's", "best-first trees", "ties of best-first trees",
    "n-gram branches", "the delta rule", "the delta rule beside what is not finite",
    "values that are infinite",
}  # fmt: skip


@pytest.mark.smoke
def test_smoke_cases_run_every_kernel() -> None:
    kernels = {name: made for name, (_, made) in STEPS.items()}
    others = set().union(*(kernels[name] for name in kernels.keys() - REPEATED))
    assert others == set().union(*kernels.values())


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        pytest.param(
            arch, name, id=f"{name}-{arch}",
            marks=[pytest.mark.smoke] * (arch == 90 and name not in REPEATED),
        )
        for arch in ARCHS
        for name in STEPS
    ],
    indirect=["machine"],
)  # fmt: skip
def test_the_rest_of_a_step(machine: Stepped, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check, kernels = STEPS[name]
    check(monkeypatch)
    assert set(machine.kernels) == kernels


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"shfl\.sync\.bfly\.b32\s+(%r\d+), (%r\d+),[^;]*;", r"mov.b32 \1, \2;"),
        (r", 31743;", ", 31744;"),
        (r"@%p\d+ (st\.global)", r"\1"),
    ],
    ids=["a lane sees its own numbers alone", "infinity is finite", "every row is stored"],
)
def test_values_that_are_not_contained_are_noticed(
    machine: Stepped, pattern: str, instead: str
) -> None:
    def damaged(ptx: str) -> str:
        other, count = re.subn(pattern, instead, ptx)
        # Not by an AssertionError, which is waited for.
        return other if count else pytest.fail("the kernel has no such instruction")

    machine.damage = damaged
    with pytest.raises(AssertionError):
        finite.test_the_devices_kernel_stores_what_the_hosts_does(FP16, float("-inf"))
    assert machine.kernels["_isolate_nonfinite_kernel"] == 1


@pytest.mark.parametrize("size", [4, 8])
def test_more_branches(machine: Stepped, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    ngrams.test_branches_are_those_of_the_host(size, 16, 7, monkeypatch)
    ngrams.test_merged_trees_are_those_of_the_host(False, 40, 6)


def test_more_of_the_delta_rule(machine: Stepped) -> None:
    for shape in ("chain", "star"):
        delta.test_every_branch_is_decoded_as_alone(shape, (1, 1))
    delta.test_sizes_of_several_tiles(72, 40)
    delta.test_gates_at_their_ends("denormal")
    delta.test_what_was_not_accepted_is_not_read()


def test_memory_that_nobody_wrote_is_poison(machine: Stepped) -> None:
    assert torch.empty(3).isnan().all() and torch.empty(3, dtype=BF16).isnan().all()
