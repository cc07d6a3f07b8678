# SPDX-License-Identifier: Apache-2.0
"""Every refusal names the field, its value, what is legal and what to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from vllm_specplug.options import (
    TreeOptions,
    changed_tree_options,
    check_kernel,
    check_num_nodes,
    check_target,
    check_tree_budget,
    check_tree_depth,
    check_tree_shape,
    check_vllm_options,
    max_scheduled_rows,
)


def test_defaults_are_legal_and_unchanged() -> None:
    assert changed_tree_options(TreeOptions()) == []
    assert changed_tree_options(TreeOptions(tree_width=3, ngram_topk=0)) == [
        "tree_width",
        "ngram_topk",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tree_width", 0),
        ("tree_width", 65),
        ("tree_depth", 0),
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
        check_tree_shape(3, 5)
    check_tree_shape(5, 5)


def test_depth_beyond_the_head_is_refused() -> None:
    assert check_tree_depth(None, 8, 7) == 7
    assert check_tree_depth(3, 8, 7) == 3
    with pytest.raises(ValueError, match=r"tree_depth=8 .*1\.\.7"):
        check_tree_depth(8, 8, 7)


def test_foreign_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="prompt_lookup_max=4"):
        check_vllm_options(SimpleNamespace(prompt_lookup_max=4), {}, "jetspec")
    with pytest.raises(ValueError, match="rejection_sample_method='synthetic'.*lossless"):
        check_vllm_options(SimpleNamespace(rejection_sample_method="synthetic"), {}, "jetspec")
    check_vllm_options(SimpleNamespace(rejection_sample_method="standard"), {}, "jetspec")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("FOLDER/nowhere", "there is no such folder"),
        ("./nowhere", "there is no such folder"),
        ("~/nowhere/at/all", "there is no such folder"),
        ("not/a/hub/id", "there is no such folder"),
        ("FOLDER", "it has no config.json"),
        ("FOLDER/file.gguf", None),
        ("hub/id", None),
        ("gpt2", None),
        ("s3://bucket/a/model", None),
    ],
)
def test_a_target_that_is_not_there(tmp_path: Path, model: str, reason: str | None) -> None:
    (tmp_path / "file.gguf").touch()
    model = model.replace("FOLDER", str(tmp_path))
    if reason is None:
        check_target(model)
        return
    with pytest.raises(ValueError) as error:
        check_target(model)
    assert str(error.value).startswith(f"target={model!r} is not usable: {reason}. Give the folder")


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("auto", "cpu cuda"),
        ("reference", "cpu cuda"),
        ("cpp", "cpu"),
        ("cute", "cuda"),
        ("triton", "cuda"),
    ],
)
def test_kernels_by_device(name: str, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment makes a CPU run a GPU's kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for device in ("cpu", "cuda"):
        if device in devices.split():
            check_kernel(name, device)
            continue
        with pytest.raises(ValueError, match=f"tree_kernel='{name}'.*of a {device} device are"):
            check_kernel(name, device)


@pytest.mark.parametrize(("scheduled", "expected"), [(None, 512), (64, 64), (1024, 512)])
def test_steps_hold_no_more_rows_than_the_scheduler_gives_them(
    scheduled: int | None, expected: int
) -> None:
    config = SimpleNamespace(max_num_batched_tokens=512, max_num_scheduled_tokens=scheduled)
    assert max_scheduled_rows(config) == expected
