# SPDX-License-Identifier: Apache-2.0
"""The tables of what proves the CUDA kernels count the tests that there are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("triton")
pytest.importorskip("vllm")

from scripts import proof_table, resource_table, sass
from scripts.proof_recorder import LISTED, notes_of
from scripts.proof_table import AGAIN, KERNELS, MODULES, by_kernel, by_module, label, notes

PAGE = proof_table.PAGE.read_text()


def rows(text: str) -> dict[str, list[str]]:
    return sass.recorded(f"<!-- t -->{text}<!-- /t -->", "t")


def test_every_module_has_as_many_cases_as_are_told(request: pytest.FixtureRequest) -> None:
    """Those of the default tier, in a run that has them all."""
    told = {
        name: [what, *("" if cell.startswith("0 +") else cell.partition(" + ")[0] for cell in rest)]
        for name, (what, *rest) in sass.recorded(PAGE, MODULES).items()
    }
    # Other folders have modules of the same names.
    paths = {*proof_table.device_modules()}
    items = [
        item
        for item in request.session.items
        if item.path in paths and item.get_closest_marker("full") is None
    ]
    there = {f"`{item.path.name}`" for item in items}
    arguments = request.config.invocation_params.args
    wanted = {name for name, cells in told.items() if cells[1] and name != "Module"}
    if not there >= wanted or "-k" in arguments:
        # Of a module or a selection nothing can be counted; `make test` collects them all.
        pytest.skip("a part of the tests: the full tier counts by itself")
    assert rows(by_module(notes_of(items))) == told, AGAIN


@pytest.mark.full
def test_every_module_has_as_many_cases_as_are_told_in_both_tiers() -> None:
    found = notes(launches=False)
    assert rows(by_module(found)) == sass.recorded(PAGE, MODULES), AGAIN
    # What is compiled is known without a launch.
    compiled = [name for name, case in found.items() if case["module"] == "test_cute_compile"]
    assert len(compiled) > 100


@pytest.mark.full
def test_kernels_are_launched_by_as_many_cases_as_are_told() -> None:
    assert rows(by_kernel(notes(launches=True))) == sass.recorded(PAGE, KERNELS), AGAIN


def test_every_kernel_has_each_kind_of_proof() -> None:
    """Interpreted (Triton's), stepped for sm_90, and compiled."""
    recorded = sass.recorded(PAGE, KERNELS)
    kernels = {name: cells for name, cells in recorded.items() if ":" not in name}
    _, resources = resource_table.recorded(resource_table.PAGE.read_text())
    every = {name.partition(" ")[0] for found in resources.values() for name in found}
    assert {label(name) for name in (*every, "cute", "cute merge")} == kernels.keys()
    for name, (interpreted, _, sm_90, _, _, compiled) in kernels.items():
        assert interpreted or name.startswith("CuTe"), name
        assert sm_90 and compiled, name


def test_modules_that_are_listed_alone_are_there() -> None:
    assert {*LISTED} <= {path.stem for path in proof_table.device_modules()}


def case(*launches: list[Any], **told: Any) -> dict[str, Any]:
    base = {"module": "test_x", "full": False, "control": False, "damage": False}
    return {**base, **told, "launches": [*launches]}


WINDOW = ["window", "bfloat16", "Dh 64"]


def test_cases_are_counted_by_kernel_variant_and_tier() -> None:
    found = {
        "a": case(["tree_attn", "interpreted", WINDOW]),
        "b": case(["tree_attn", "sm_90", WINDOW], ["walk", "sm_90", []], full=True),
        "c": case(["tree_attn", "sm_90", ["bfloat16", "Dh 64"]], control=True, damage=True),
        "d": case(["tree_attn", "sm_80", WINDOW], control=True),
        "e": case(),
    }
    counted = rows(by_kernel(found))
    assert counted["Triton attention"][:5] == ["1", "1", "1 + 1", "1", "1"]
    assert counted["Triton attention: window"][:5] == ["1", "1", "0 + 1", "1", ""]
    assert counted["Triton attention: sinks"][:5] == ["", "", "", "", ""]
    assert counted["`walk`"][:5] == ["", "", "0 + 1", "", ""]
    # A case more, or one less, is another table.
    assert rows(by_kernel({**found, "f": found["a"]})) != counted
    assert rows(by_kernel({name: found[name] for name in "abce"})) != counted


def test_compiled_variants_are_counted_by_their_names() -> None:
    name = "x.py::test_cubin[tree_attn_sm90_d64_bfloat16_w1_s6_box16_window]"
    found = {
        name: case(module="test_cute_compile"),
        name.replace("_window", ""): case(module="test_cute_compile", full=True),
    }
    aspects = (None, "window", "boxes of 16", "boxes of 64", "Dh 64", "Dh 128", "sinks")
    counted = [proof_table.compiled_cute(found, "cute", aspect) for aspect in aspects]
    assert counted == ["1 + 1", "1", "1 + 1", "", "1 + 1", "", ""]
    every = int(proof_table.compiled_triton("tree_attn", None))
    some = [int(proof_table.compiled_triton("tree_attn", a)) for a in ("window", "parts", "Dh 512")]
    assert all(0 < count < every for count in some)
    assert proof_table.compiled_triton("merge", None) == "3"
