# SPDX-License-Identifier: Apache-2.0
"""Tables of all options with type, default, legal values and meaning, from their declarations."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from typing import Any, get_type_hints

from vllm_specplug.drafting.method import Method
from vllm_specplug.options import (
    DEFAULT_CUDA_TREE_NODES,
    DEFAULT_TREE_NODES,
    MAX_TREE_NODES,
    TreeOptions,
    bounds,
    describe_type,
    option_defaults,
)
from vllm_specplug.registry import legal_method_names

HEADER = ("option", "type", "default", "legal", "meaning")


def shared_options() -> list[tuple[str, ...]]:
    """Returns one row per option that all methods have."""
    rows: list[tuple[str, ...]] = [
        (
            "`method`",
            "string",
            "required",
            ", ".join(f"`{name}`" for name in legal_method_names()),
            "The method; `tree` selects the one that the head is made for, by its config and "
            "tensor names. vLLM's own methods work as usual.",
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
            f"`{DEFAULT_TREE_NODES}`, on CUDA `{DEFAULT_CUDA_TREE_NODES}`",
            f"1..{MAX_TREE_NODES}, at least `tree_depth`",
            "Node budget of one tree, the root (last committed token) excluded. On CUDA 2^k - 1 "
            "nodes fill the kernels' row tiles.",
        ),
    ]
    docs, defaults = field_docs(TreeOptions), option_defaults(TreeOptions)
    hints = get_type_hints(TreeOptions)
    for field in fields(TreeOptions):
        metadata = getattr(field.default, "metadata", ())
        name = field.name
        rows.append(_row(name, hints[name], defaults[name], metadata, docs[name]))
    return rows


def method_options(method: Method) -> list[tuple[str, ...]]:
    """Returns one row per option that this method declares."""
    return [
        _row(name, info.annotation, info.default, info.metadata, info.description or "")
        for name, info in method.load_options().model_fields.items()
    ]


def _row(name: str, hint: Any, default: Any, metadata: Any, meaning: str) -> tuple[str, ...]:
    type_name, span, words = describe_type(hint)
    legal = ", ".join(part for part in (span, *(f"`{word}`" for word in words)) if part)
    legal = legal or bounds(metadata) or "any"
    default_text = "unset" if default is None else f"`{str(default).lower()}`"
    return f"`{name}`", type_name, default_text, legal, " ".join(meaning.split())


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstring of each field of a class, on one line."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            text = following.value.value  # type: ignore[attr-defined]
            docs[statement.target.id] = " ".join(text.split())  # type: ignore[union-attr]
    return docs
