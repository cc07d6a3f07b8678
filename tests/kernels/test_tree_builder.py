# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.tree.candidates import hard_cases
from vllm_specplug.kernels import build_best_first
from vllm_specplug.tree import build_tree


def by_triton(ids, log_probs, budgets, depths, width):
    from vllm_specplug.kernels.tree_builder_triton import build_best_first_triton

    nodes = max(1, int(budgets.max()))
    return build_best_first_triton(ids, log_probs, budgets, depths, width, nodes)


def check(ids, log_probs, budgets, depths, width, build=build_best_first) -> None:
    """Compares with the Python builder."""
    expected = [
        build_tree(*candidates, tree_width=width, tree_depth=depth)
        for *candidates, depth in zip(ids, log_probs, budgets, depths, strict=True)
    ]
    tokens, parents, node_depths, scores, counts = build(
        torch.from_numpy(ids),
        torch.from_numpy(log_probs),
        torch.tensor(budgets, dtype=torch.int32),
        torch.tensor(depths, dtype=torch.int32),
        width,
    )
    for b, tree in enumerate(expected):
        n = counts[b]
        assert n == tree.num_nodes
        np.testing.assert_array_equal(tokens[b, :n], tree.token_ids)
        np.testing.assert_array_equal(parents[b, :n], tree.parent_indices)
        np.testing.assert_array_equal(node_depths[b, :n], tree.depths)
        np.testing.assert_array_equal(scores[b, :n], tree.scores)


def candidates(rng, shape, step=None):
    ids = rng.permuted(np.tile(np.arange(500), (*shape[:2], 1)), axis=2)[:, :, : shape[2]]
    log_probs = rng.normal(size=shape).astype(np.float32) - 2
    if step:  # few distinct values: many ties
        log_probs = np.round(log_probs / step) * np.float32(step)
    return ids.astype(np.int64).copy(), -np.sort(-log_probs, axis=2).astype(np.float32)


MANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(MANY, max_examples=60)
@given(hard_cases())
def test_sure_tied_masked_and_broken_candidates(compiled, interpreter, case):
    """tests/unit/tree/test_builders.py compares the Python builder with an exhaustive search."""
    arguments = (case.token_ids[None], case.log_probs[None], [case.budget], [case.tree_depth])
    for build in (build_best_first, by_triton):
        check(*arguments, case.tree_width, build)


@MANY
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(0, 10**6),
    st.sampled_from([None, 0.5, 2.0]),
    st.integers(1, 10),
)
def test_node_for_node_the_python_tree(compiled, num_reqs, depth, ranks, seed, step, width):
    rng = np.random.default_rng(seed)
    ids, log_probs = candidates(rng, (num_reqs, depth, ranks), step)
    budgets = rng.integers(0, 70, num_reqs).tolist()
    depths = rng.integers(0, depth + 2, num_reqs).tolist()
    check(ids, log_probs, budgets, depths, width)


@pytest.mark.parametrize("step", [None, 0.5, 8.0])
@pytest.mark.parametrize(
    ("num_reqs", "depth", "ranks", "budgets"), [(3, 5, 4, [9, 1, 0]), (2, 8, 8, [40, 64])]
)
def test_the_device_builds_the_same_trees(interpreter, num_reqs, depth, ranks, budgets, step):
    ids, log_probs = candidates(np.random.default_rng(depth), (num_reqs, depth, ranks), step)
    check(ids, log_probs, budgets, list(range(depth, depth - num_reqs, -1)), ranks, by_triton)


def test_a_budget_past_the_output_is_refused(compiled):
    ids, log_probs = candidates(np.random.default_rng(0), (1, 2, 2))
    small = torch.empty(1, 3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="budget 4 of request 0 exceeds the 3 nodes"):
        torch.ops.specplug.build_best_first(
            torch.from_numpy(ids), torch.from_numpy(log_probs), torch.tensor([4]).int(),
            torch.tensor([2]).int(), 2, torch.empty(1, 3).long(), small, small.clone(),
            torch.empty(1, 3), torch.empty(1).int(),
        )  # fmt: skip
