# SPDX-License-Identifier: Apache-2.0
"""Methods are folders of this package, entry points of others, or registered in the process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import vllm_specplug.registry as registry
from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.drafting.method import Method
from vllm_specplug.registry import (
    find_method,
    get_method,
    methods,
    owners_of,
    recognise_head,
    register,
)

ROOT = Path(__file__).resolve().parents[2]
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
    folders = {p.parent.name for p in package.glob("*/drafter.py")} - {"block", "local"}
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
        ({"name": "jetspec"}, "'jetspec' is taken by .*block.drafter"),
        ({"name": "tree"}, "'tree' is reserved for the method of a head"),
    ],
)
def test_impossible_declarations_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register(replace(STRANGER, **changes))  # type: ignore[arg-type]


def test_a_method_that_names_no_version_fits_only_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = replace(STRANGER, name="named", api_version=2)
    monkeypatch.setattr(registry, "API_VERSION", 2)
    registry.check_declaration(named, {})
    with pytest.raises(ValueError, match="version 1 of the contract"):
        registry.check_declaration(STRANGER, {})


def test_options_have_owners() -> None:
    assert owners_of("kv_budget") == ["tokenswift"]
    assert owners_of("tree_width") == []


def is_odd(head: HeadFiles) -> bool:
    return head.architectures == ("OddHead",)


def is_everything(head: HeadFiles) -> bool:
    return True


def is_broken(head: HeadFiles) -> bool:
    raise RuntimeError("broken")


def _odd_head(folder: Path) -> Path:
    (folder / "config.json").write_text('{"architectures": ["OddHead"]}')
    return folder


@pytest.mark.parametrize(
    "name", ["jetspec", "ddtree", "dspark_tree", "eagle3_tree", "longspec", "tokenswift"]
)
def test_shipped_heads_are_recognised(name: str) -> None:
    folder = ROOT / str(get_method(name).presets["smollm2"]["model"])
    assert recognise_head(folder).name == name
    assert find_method("tree", str(folder)) is get_method(name)
    assert find_method(name, None) is get_method(name)


def test_an_unknown_kind_says_what_was_found_and_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model=.*no method knows") as error:
        recognise_head(_odd_head(tmp_path))
    for words in ("OddHead", "no tensors", "'jetspec': causal block head", "'longspec'"):
        assert words in str(error.value)
    assert "ngram_tree" not in str(error.value)


def test_heads_of_several_methods_need_a_name(tmp_path: Path) -> None:
    register(replace(STRANGER, recognises=f"{__name__}:is_everything"))
    register(replace(STRANGER, name="other", recognises=f"{__name__}:is_odd"))
    with pytest.raises(ValueError, match="several methods .*'stranger'.*'other'.*Name one"):
        recognise_head(_odd_head(tmp_path))


def test_a_method_that_breaks_affects_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register(replace(STRANGER, recognises=f"{__name__}:is_broken"))
    register(replace(STRANGER, name="other", recognises=f"{__name__}:is_odd"))
    assert recognise_head(_odd_head(tmp_path)).name == "other"


def test_a_method_by_its_head_needs_a_head() -> None:
    with pytest.raises(ValueError, match="model=None.*'tree' needs a draft head"):
        find_method("tree", None)
    assert find_method("ngram", None) is None and find_method(None, None) is None
