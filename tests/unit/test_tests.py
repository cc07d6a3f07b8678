# SPDX-License-Identifier: Apache-2.0
"""Habits of the tests themselves."""

from __future__ import annotations

import ast
from pathlib import Path

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
