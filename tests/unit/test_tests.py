# SPDX-License-Identifier: Apache-2.0
"""Habits of the tests themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_no_test_imports_another_test_module() -> None:
    """Importing one collects its tests and fixtures twice; what is shared has a module."""
    for path in TESTS.rglob("*.py"):
        parts = [part for name in _imported(path) for part in name.split(".")[:-1]]
        assert not [part for part in parts if part.startswith("test_")], path


def _starts_a_server(source: str) -> bool:
    return "VllmServer(" in source and 'scope="module"' in source


def test_tests_of_one_server_run_in_one_process() -> None:
    """Otherwise each of pytest's workers starts the server for its share of the tests."""
    paths = (TESTS / "e2e").rglob("test_*.py")
    modules = [path for path in paths if _starts_a_server(path.read_text())]
    # Those of `own_process` are grouped by their mark.
    assert modules
    for path in modules:
        tree = ast.parse(path.read_text())
        marks = [ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign)
                 and ast.unparse(n.targets[0]) == "pytestmark"]  # fmt: skip
        for test in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
            own = [ast.unparse(decorator) for decorator in test.decorator_list]
            if test.name.startswith("test_"):
                assert any("xdist_group" in mark for mark in marks + own), (path, test.name)


@pytest.mark.xdist_group("groups")
def test_groups_stay_together(request: pytest.FixtureRequest) -> None:
    """pytest-xdist schedules by the suffix it gives to node ids; without one, groups are torn
    apart and each worker starts their engines."""
    if not hasattr(request.config, "workerinput") or not request.config.getvalue("loadgroup"):
        pytest.skip("runs in one process, or without --dist loadgroup")
    assert request.node.nodeid.endswith("@groups")
