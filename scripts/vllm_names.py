# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that the package uses, read from its code.

    python scripts/vllm_names.py

There are three kinds, as "module:Attribute.path": names imported from vLLM (also as attributes of
an imported module), methods that subclasses override, and private attributes of other packages'
objects. The class of the last is unknown, so only their name is given: ":_name".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "vllm_specplug", ROOT / "kernels" / "src")
_NAMED = re.compile(r"vllm(\.\w+)+:\w+(\.\w+)*")
_ACCESSORS = ("getattr", "setattr", "hasattr", "delattr")


@dataclass
class UsedNames:
    """Names of vLLM that the code uses."""

    imported: set[str] = field(default_factory=set)
    overridden: dict[str, set[str]] = field(default_factory=dict)
    """Methods that a subclass in the package defines, by vLLM class, which need not have them."""
    private: set[str] = field(default_factory=set)


def is_private(name: str) -> bool:
    """Whether `name` is private; dunder methods are not."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@dataclass
class _Module:
    tree: ast.Module
    # local name -> "module" of an imported module, or "module:name"
    imports: dict[str, str]
    # private names that this module defines
    own: set[str]


def _read(path: Path) -> _Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports: dict[str, str] = {}
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                imports[alias.asname or alias.name] = f"{node.module}:{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                imports[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Constant) and _NAMED.fullmatch(str(node.value)):
            # A name in a string instead of an import.
            if not path.name.startswith("listing"):
                imports[f"'{node.value}'"] = str(node.value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                own.add(node.attr)
    return _Module(tree, imports, own)


def _is_vllm(target: str) -> bool:
    return target.partition(":")[0].split(".")[0] == "vllm"


def _root(node: ast.expr) -> str | None:
    """Returns the first name of a chain of attributes and calls."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _private_uses(module: _Module) -> Iterator[str]:
    """Yields private attributes that are read, written or named, but not defined in the module."""
    for node in ast.walk(module.tree):
        name, owner = None, None
        if isinstance(node, ast.Attribute):
            name, owner = node.attr, node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _ACCESSORS
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            name, owner = str(node.args[1].value), node.args[0]
        if name is None or owner is None or not is_private(name) or name in module.own:
            continue
        root = module.imports.get(_root(owner) or "")
        if root is None or _is_vllm(root):
            yield name


def used_names(sources: tuple[Path, ...] = SOURCES) -> UsedNames:
    """Returns all names of vLLM that the package's code uses."""
    modules = [_read(path) for folder in sources for path in sorted(folder.rglob("*.py"))]
    used = UsedNames()
    classes = {
        node.name: (node, module)
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    for module in modules:
        for local, target in module.imports.items():
            if not _is_vllm(target):
                continue
            attributes = {
                node.attr
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == local
            }
            if ":" in target:
                used.imported.add(target)
            used.private |= {f":{name}" for name in attributes if is_private(name)}
            if ":" not in target:
                used.imported |= {f"{target}:{name}" for name in attributes}
        used.private |= {f":{name}" for name in _private_uses(module)}
    for node, _ in classes.values():
        bases, methods = _bases_and_methods(node, classes)
        for base in bases:
            used.overridden.setdefault(base, set()).update(methods)
    # Names with a module are not repeated without one.
    known = {target.rpartition(":")[2] for target in used.imported}
    known |= {name for methods in used.overridden.values() for name in methods}
    used.private = {name for name in used.private if name[1:] not in known}
    return used


def _bases_and_methods(
    node: ast.ClassDef, classes: dict[str, tuple[ast.ClassDef, _Module]]
) -> tuple[set[str], set[str]]:
    """Returns vLLM's classes among a class's ancestors, and the methods of our classes below."""
    _, module = classes[node.name]
    bases: set[str] = set()
    methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    for base in node.bases:
        if not isinstance(base, ast.Name):
            continue
        target = module.imports.get(base.id, "")
        if _is_vllm(target):
            bases.add(target)
        elif base.id in classes and base.id != node.name:
            more, inherited = _bases_and_methods(classes[base.id][0], classes)
            bases |= more
            methods |= inherited
    return bases, methods


def main() -> None:
    used = used_names()
    for target in sorted(used.imported | used.private):
        print(target)
    for base, methods in sorted(used.overridden.items()):
        print(f"{base} < {', '.join(sorted(methods))}")


if __name__ == "__main__":
    main()
