# SPDX-License-Identifier: Apache-2.0
"""Every refusal names the field, its value, what is legal and what to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_specplug.options import (
    TreeOptions,
    changed_tree_options,
    check_device_options,
    check_node_budgets,
    check_target,
)


def test_defaults_are_legal_and_unchanged() -> None:
    assert changed_tree_options(TreeOptions()) == []
    assert changed_tree_options(TreeOptions(tree_width=3, ngram_topk=0)) == [
        "tree_width",
        "ngram_topk",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("tree_budget", -1), ("tree_budget", 9), ("tree_budget", True), ("max_request_budget", 9)],
)
def test_budgets_fit_the_nodes_of_a_tree(name: str, value: int) -> None:
    def check(**changes: object) -> None:
        none = {"tree_depth": None, "tree_budget": "auto", "max_request_budget": None}
        check_node_budgets(SimpleNamespace(num_speculative_tokens=8, **{**none, **changes}))

    with pytest.raises(ValueError, match=rf"{name}={value} .*num_speculative_tokens=8"):
        check(**{name: value})
    for legal in ("auto", 0, 8):
        check(tree_budget=legal)
    check(max_request_budget=8)


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
    ("option", "value", "devices"),
    [
        ("tree_kernel", "auto", "cpu cuda"),
        ("tree_kernel", "reference", "cpu cuda"),
        ("tree_kernel", "cpp", "cpu"),
        ("tree_kernel", "cute", "cuda"),
        ("draft_weights", "full", "cpu cuda"),
        ("draft_weights", "int8", "cpu"),
        ("draft_weights", "fp8", "cuda"),
        ("target_products", "vllm", "cpu cuda"),
        ("target_products", "packed", "cpu"),
    ],
)
def test_values_by_device(
    option: str, value: str, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No environment makes a CPU run a GPU's kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = TreeOptions(**{option: value})
    for device in ("cpu", "cuda"):
        if device in devices.split():
            check_device_options(options, device)
            continue
        with pytest.raises(ValueError, match=f"{option}='{value}'.*on a {device} device, legal: "):
            check_device_options(options, device)
