# SPDX-License-Identifier: Apache-2.0
"""A digest of what sources say to a compiler, kept with tables that take minutes to make: a test
that compiles nothing then notices a table of other sources."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path


def digest(paths: Iterable[Path], *, constants_alone: Callable[[Path], bool]) -> str:
    """Neither comments nor docstrings count.

    Args:
        constants_alone: of which modules nothing counts but constants.
    """
    found = hashlib.sha256()
    for path in paths:
        tree = ast.parse(path.read_text())
        if constants_alone(path):
            tree.body = [
                node
                for node in tree.body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            ]
        for node in ast.walk(tree):
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
            if isinstance(node, documented) and ast.get_docstring(node) is not None:
                node.body[0] = ast.Pass()
        found.update(f"{path.name}\0{ast.unparse(tree)}\0".encode())
    return found.hexdigest()[:16]


def stamp(made: str) -> str:
    """What stands above a table."""
    return f"from sources of digest `{made}`:"


def recorded(page: str) -> str:
    """The digest above the table in `page`."""
    (found,) = re.findall(stamp(r"(\w+)"), page)
    return found
