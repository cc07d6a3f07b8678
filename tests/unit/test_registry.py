# SPDX-License-Identifier: Apache-2.0
"""Methods are folders of this package, entry points of others, or registered in the process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import vllm_specplug.registry as registry
from vllm_specplug.drafting.method import Method
from vllm_specplug.registry import get_method, methods, owners_of, register

STRANGER = Method(
    name="stranger",
    summary="somebody else's",
    options="vllm_specplug.methods.ngram_tree.options:NgramTreeOptions",
    drafter="vllm_specplug.methods.ngram_tree.drafter:NgramTreeDrafter",
    needs_head=False,
)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def test_every_folder_with_a_declaration_is_a_method() -> None:
    package = Path(registry.__file__).parent / "methods"
    folders = {p.parent.name for p in package.glob("*/drafter.py")} - {"block"}
    assert set(methods()) >= folders
    for name, method in methods().items():
        assert method.name == name and method.load_options() and method.load_drafter()


def test_declarations_need_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from vllm_specplug.registry import methods\n"
        "[m.option_names() for m in methods().values()]\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_registered_method_is_known() -> None:
    register(STRANGER)
    assert get_method("stranger") is STRANGER
    register(STRANGER)  # again is no error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"api_version": 99}, "version 99 of the contract"),
        ({"name": "jetspec"}, "'jetspec' is taken by .*jetspec.drafter"),
    ],
)
def test_impossible_declarations_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register(replace(STRANGER, **changes))  # type: ignore[arg-type]


def test_options_have_owners() -> None:
    assert owners_of("window_size") == ["longspec"]
    assert owners_of("causal") == ["ddtree", "dels", "jetspec"]
    assert owners_of("tree_width") == []
