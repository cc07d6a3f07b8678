# SPDX-License-Identifier: Apache-2.0
"""The table of options in docs/options.md, made from `vllm_specplug/options.py`.

python scripts/options_table.py            print the table
python scripts/options_table.py --write    put it into docs/options.md
python scripts/options_table.py --check    exit 1 when docs/options.md differs
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vllm_specplug.options import DEFAULT_TREE_NODES, MAX_TREE_NODES, TreeOptions
from vllm_specplug.registry import METHOD_NAMES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
BEGIN, END = "<!-- options: scripts/options_table.py --write -->", "<!-- /options -->"
HEADER = ("option", "type", "default", "legal", "meaning")


def option_rows() -> list[tuple[str, ...]]:
    """One row per option of a tree method: name, type, default, legal values, meaning."""
    rows = [
        (
            "`method`",
            "string",
            "required",
            ", ".join(f"`{name}`" for name in METHOD_NAMES),
            "The method; vLLM's own methods work as usual.",
        ),
        (
            "`model`",
            "string",
            "required by methods with a head",
            "a folder, or a hub id in the local cache",
            "The draft head. Nothing is downloaded while serving.",
        ),
        (
            "`num_speculative_tokens`",
            "int",
            f"`{DEFAULT_TREE_NODES}`",
            f"1..{MAX_TREE_NODES}, at least `tree_depth`",
            "Node budget per tree, excluding the root (the last committed token).",
        ),
    ]
    docs = field_docs(TreeOptions)
    hints = get_type_hints(TreeOptions)
    for field in fields(TreeOptions):
        info: Any = field.default
        has_info = hasattr(info, "metadata")
        default = info.default if has_info else info
        type_name, choices = describe_type(hints[field.name])
        legal = choices or bounds(info.metadata if has_info else ()) or "any"
        shown = "unset" if default is None else f"`{str(default).lower()}`"
        rows.append((f"`{field.name}`", type_name, shown, legal, docs[field.name]))
    return rows


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a class, on one line."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            text = following.value.value  # type: ignore[attr-defined]
            docs[statement.target.id] = " ".join(text.split())  # type: ignore[union-attr]
    return docs


def describe_type(hint: Any) -> tuple[str, str]:
    """Name of a type as JSON users know it, and its choices when it has some."""
    if get_origin(hint) in (Union, types.UnionType):
        choices = [arg for arg in get_args(hint) if arg is not type(None)]
        if len(choices) > 1 and get_origin(choices[-1]) is list:
            return f"{choices[0].__name__} or list", "0 or more"
        if len(choices) > 1 and get_origin(choices[-1]) is Literal:
            words = ", ".join(f"`{word}`" for word in get_args(choices[-1]))
            return f"{choices[0].__name__} or string", f"0 or more, {words}"
        hint = choices[0]
    if get_origin(hint) is Literal:
        return "string", ", ".join(f"`{choice}`" for choice in get_args(hint))
    if hint is str:
        return "string", "a path"
    return hint.__name__, "`true`, `false`" if hint is bool else ""


def bounds(metadata: Any) -> str:
    """ "low..high" from annotated-types bounds, "low or more"; "" without a lower one."""
    low = next((entry.ge for entry in metadata if hasattr(entry, "ge")), None)
    high = next((entry.le for entry in metadata if hasattr(entry, "le")), None)
    if low is None:
        return ""
    return f"{low} or more" if high is None else f"{low}..{high}"


def table() -> str:
    """The options as a pipe table."""
    rows = [HEADER, tuple("---" for _ in HEADER), *option_rows()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def with_table(text: str) -> str:
    """`text` with the table between the markers replaced.

    Raises:
        ValueError: when the markers are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/options.md lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        PAGE.write_text(with_table(PAGE.read_text()))
    elif arguments == ["--check"]:
        if with_table(PAGE.read_text()) != PAGE.read_text():
            print("docs/options.md: the options differ; run scripts/options_table.py --write")
            return 1
    elif not arguments:
        print(table())
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
