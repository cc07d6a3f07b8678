# SPDX-License-Identifier: Apache-2.0
"""Tests of modules that run in a child are reported as if they ran here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import os
import pytest
from tests.e2e import own_process

# No engine is built here, and it imports vLLM.
own_process.use_v2 = own_process.prepare_engines = lambda: None
pytestmark = pytest.mark.own_process(fresh=True, env={"FROM_PARENT": "x"})


@pytest.fixture(scope="module")
def shared():
    return []


@pytest.mark.parametrize("value", [1, 2])
def test_passes(shared, value):
    shared.append(value)
    assert os.environ["FROM_PARENT"] == "x" and os.getppid() == int(os.environ["PARENT"])
    assert shared == [1, 2][:value]


def test_fails():
    assert "this" == "that"


def test_is_skipped():
    pytest.skip("a reason")


def test_is_not_selected():
    raise AssertionError


def test_ends_badly():
    print("the last words")
    os._exit(3)


def test_never_starts():
    pass
"""


@pytest.mark.slow
def test_reports_are_those_of_the_child(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = own_process: in a child\n")
    hooks = "pytest_itemcollected, pytest_runtest_protocol"
    (tmp_path / "conftest.py").write_text(f"from tests.e2e.own_process import {hooks}\n")
    code = (
        "import os, pytest, sys; os.environ['PARENT'] = str(os.getpid()); sys.exit(pytest.main())"
    )
    # Tests of this process around it: what the first leaves set up is not what the last expects.
    for folder in ("first", "last"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text("def test_here(): pass")
    (tmp_path / "first" / "test_module.py").write_text(MODULE)
    run = subprocess.run(
        [sys.executable, "-c", code, "-v", "-k", "not is_not_selected", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    output = run.stdout + run.stderr
    for test, outcome in (
        ("passes[1]", "PASSED"),
        ("passes[2]", "PASSED"),
        ("fails", "FAILED"),
        ("is_skipped", "SKIPPED (a reason)"),
        ("ends_badly", "FAILED"),
        ("never_starts", "FAILED"),
    ):
        assert f"first/test_module.py::test_{test} {outcome}" in output, output
    assert "assert 'this' == 'that'" in output, output
    assert "the process ended with 3" in output and "the last words" in output, output
    assert "3 failed, 4 passed, 1 skipped, 1 deselected" in output, output
