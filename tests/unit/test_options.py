# SPDX-License-Identifier: Apache-2.0
"""Every refusal names the field, its value, what is legal and what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from vllm_specplug.options import (
    LOCAL_HEAD_OPTIONS,
    TreeOptions,
    changed_tree_options,
    check_local_options,
    check_num_nodes,
    check_tree_budget,
    check_tree_depth,
    check_tree_shape,
    check_vllm_options,
    depth_weights,
)
from vllm_specplug.registry import METHOD_NAMES, get_method, load_drafter_class


def test_defaults_are_legal_and_unchanged() -> None:
    assert changed_tree_options(TreeOptions()) == []
    assert changed_tree_options(TreeOptions(tree_width=3, causal=True)) == ["tree_width", "causal"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tree_width", 0),
        ("tree_width", 65),
        ("tree_depth", 0),
        ("tree_builder", "bfs"),
        ("hybrid_lambda", -1.0),
        ("max_step_rows", 0),
        ("tree_budget", "many"),
        ("tree_budget", 1.5),
        ("max_draft_context", -1),
        ("tree_kernel", "cuda"),
        ("tree_widht", 3),
    ],
)
def test_bad_values_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        TreeOptions(**{field: value})


@pytest.mark.parametrize("nodes", [0, 257])
def test_node_budget_range(nodes: int) -> None:
    with pytest.raises(ValueError, match=rf"num_speculative_tokens={nodes} .*1\.\.256"):
        check_num_nodes(nodes)


@pytest.mark.parametrize("budget", [-1, 9, True])
def test_tree_budget_range(budget: int) -> None:
    with pytest.raises(ValueError, match=rf"tree_budget={budget} .*num_speculative_tokens=8"):
        check_tree_budget(budget, 8)
    for legal in ("auto", 0, 8):
        check_tree_budget(legal, 8)


def test_budget_below_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=3 .*tree_depth=5.*Raise"):
        check_tree_shape(3, 5, 4)
    check_tree_shape(5, 5, 4)


def test_depth_beyond_the_head_is_refused() -> None:
    assert check_tree_depth(None, 8) == 7
    assert check_tree_depth(3, 8) == 3
    with pytest.raises(ValueError, match=r"tree_depth=8 .*1\.\.7"):
        check_tree_depth(8, 8)


def test_foreign_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="prompt_lookup_max=4"):
        check_vllm_options(SimpleNamespace(prompt_lookup_max=4), {}, "jetspec")
    with pytest.raises(ValueError, match="rejection_sample_method='synthetic'.*lossless"):
        check_vllm_options(SimpleNamespace(rejection_sample_method="synthetic"), {}, "jetspec")
    check_vllm_options(SimpleNamespace(rejection_sample_method="standard"), {}, "jetspec")


@pytest.mark.parametrize(("first_depth", "leading"), [(1, ()), (2, (0.0,))])
def test_weights_of_depths(first_depth: int, leading: tuple[float, ...]) -> None:
    corrected = 5 - len(leading)
    assert depth_weights("alpha", 0.3, 5, first_depth=first_depth) == leading + (0.3,) * corrected
    listed = [0.1 * i for i in range(corrected)]
    assert depth_weights("beta", listed, 5, first_depth=first_depth) == (*leading, *listed)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.1, 0.2], r"alpha=\[0.1, 0.2\] .* 4 depths that are corrected, 2..5, not 2"),
        (-0.1, "alpha=-0.1 .* finite and at least 0"),
        (float("nan"), "alpha=nan .* finite"),
        ([0.1, 0.2, float("inf"), 0.1], "finite and at least 0"),
        ([0.1, 0.2, -1.0, 0.1], "finite and at least 0"),
    ],
)
def test_bad_weights_are_refused(value: float | list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        depth_weights("alpha", value, 5, first_depth=2)


def test_options_of_a_local_head_belong_to_methods_with_one() -> None:
    for name, value in {
        "local_head": "x", "unigram": "x", "unigram_smoothing": 0.5, "alpha": 0.1,
        "beta": [0.1], "anchor_input": True, "local_candidates": 7, "gate_table_mb": 0,
    }.items():  # fmt: skip
        assert name in LOCAL_HEAD_OPTIONS
        options = TreeOptions(**{name: value})
        with pytest.raises(ValueError, match=f"{name}=.*method 'ddtree' has no local head"):
            check_local_options(options, "ddtree", uses_local_head=False)
    check_local_options(TreeOptions(), "ddtree", uses_local_head=False)
    with pytest.raises(ValueError, match="local_head=None .*use method ddtree"):
        check_local_options(TreeOptions(), "dels", uses_local_head=True)
    with pytest.raises(ValueError, match="tree_builder='hybrid' .*only best_first"):
        check_local_options(
            TreeOptions(local_head="x", tree_builder="hybrid"), "dels", uses_local_head=True
        )
    check_local_options(TreeOptions(local_head="x"), "dels", uses_local_head=True)


def test_methods_are_registered_and_importable() -> None:
    for name in METHOD_NAMES:
        assert get_method(name).name == name
        assert load_drafter_class(name)
    with pytest.raises(ValueError, match="known: " + ", ".join(METHOD_NAMES)):
        get_method("medusa")
