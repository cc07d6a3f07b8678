# SPDX-License-Identifier: Apache-2.0
"""Compares the seams with a vLLM source tree, without importing it.

    python scripts/check_seams.py /path/to/vllm-source [--json]

It looks up all names of vLLM that the package uses in the source: those of the seams, and those
that the code imports (`scripts/vllm_names.py`). It compares the parameters of functions with
those of the installed vLLM. It does not check behaviour: a release is supported if the tests pass
with it.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from functools import cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
from scripts.vllm_names import used_names  # noqa: E402
from vllm_specplug.seams import ALL_SEAMS  # noqa: E402

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@cache
def parse(source: Path, module: str) -> ast.Module | None:
    """Returns the module's syntax tree; None if the source has no such module."""
    path = source.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return ast.parse(candidate.read_text(encoding="utf-8"))
    return None


def imported_from(tree: ast.Module, name: str, package: str) -> list[tuple[str, str]]:
    """Returns modules that may define a name that `tree` imports, each with the original name.

    `package` is the start of relative imports.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            module = ".".join([*(base if node.level else ()), *([node.module or ""])]).strip(".")
            for alias in node.names:
                if (alias.asname or alias.name) == name or alias.name == "*":
                    found.append((module, name if alias.name == "*" else alias.name))
    return found


def is_set_by(node: ast.ClassDef, name: str) -> bool:
    """Whether a method of the class assigns an attribute with this name."""
    return any(
        isinstance(part, ast.Attribute) and part.attr == name and isinstance(part.ctx, ast.Store)
        for part in ast.walk(node)
    )


def defined(body: list[ast.stmt], name: str) -> Definition | None:
    """Returns the definition of `name` in a module's or class's body, also in an `if` or `try`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                return node
        elif isinstance(node, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return node
        elif isinstance(node, ast.AnnAssign):
            if isinstance(node.target, ast.Name) and node.target.id == name:
                return node
        elif isinstance(node, ast.If | ast.Try):
            found = defined([*node.body, *node.orelse], name)
            if found is not None:
                return found
    return None


def find(source: Path, module: str, path: str, depth: int = 0) -> Definition | ast.Module | None:
    """Returns the definition of a dotted attribute, found through imports and base classes; the
    class for an attribute that its methods set."""
    tree = parse(source, module)
    if tree is None or depth > 6:
        return None
    head, _, rest = path.partition(".")
    node = defined(tree.body, head)
    if node is None:
        is_package = source.joinpath(*module.split("."), "__init__.py").is_file()
        package = module if is_package else module.rpartition(".")[0]
        for origin, name in imported_from(tree, head, package):
            if origin.startswith("vllm") and origin != module:
                found = find(source, origin, f"{name}.{rest}".rstrip("."), depth + 1)
                if found is not None:
                    return found
        return None if rest else parse(source, f"{module}.{head}")
    if not rest:
        return node
    if isinstance(node, ast.FunctionDef):
        # A buffer that the function registers.
        names = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
        return node if rest in names else None
    if not isinstance(node, ast.ClassDef):
        return None
    member = defined(node.body, rest)
    if member is not None:
        return member
    if is_set_by(node, rest):
        return node
    for base in node.bases:
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name):
            found = find(source, module, f"{base.id}.{rest}", depth + 1)
            if found is not None:
                return found
    return None


def parameters(node: Definition | ast.Module | None) -> list[str] | None:
    """Returns the names of a function's parameters; None for other definitions."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    a = node.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return names + [f"*{arg.arg}" for arg in (a.vararg, a.kwarg) if arg is not None]


def all_targets() -> set[str]:
    """Returns all names of vLLM that the package uses, except those that it adds."""
    listed = {target for seam in ALL_SEAMS if seam.kind != "adds" for target in seam.targets}
    # Of a class whose types are replaced, the class is in the source.
    return {target.removesuffix(".__annotations__") for target in listed} | used_names().imported


def compare(source: Path, installed: Path, targets: set[str]) -> dict[str, str]:
    """Returns "same", "missing" or the change of its parameters for every name."""
    result = {}
    for module, _, path in sorted(target.partition(":") for target in targets):
        node = find(source, module, path)
        before, after = parameters(find(installed, module, path)), parameters(node)
        if node is None:
            answer = "missing"
        elif before != after:
            answer = f"parameters were {before}, are {after}"
        else:
            answer = "same"
        result[f"{module}.{path}"] = answer
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path, help="a vLLM source tree, the folder with vllm/ in it")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.source / "vllm" / "__init__.py").is_file():
        parser.error(f"{arguments.source} holds no vllm/__init__.py")
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    result = compare(arguments.source, Path(spec.origin).parents[1], all_targets())
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        for seam, answer in result.items():
            print(f"{answer:8} {seam}" if answer in ("same", "missing") else f"{seam}: {answer}")
    return int(any(answer != "same" for answer in result.values()))


if __name__ == "__main__":
    sys.exit(main())
