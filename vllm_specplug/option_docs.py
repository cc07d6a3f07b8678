# SPDX-License-Identifier: Apache-2.0
"""Tables of all options with type, default, legal values and meaning, from their declarations."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.fields import FieldInfo

from vllm_specplug.drafting.method import Method
from vllm_specplug.options import (
    DEFAULT_CUDA_TREE_NODES,
    DEFAULT_TREE_NODES,
    MAX_TREE_NODES,
    TreeOptions,
    bounds,
    describe_type,
)
from vllm_specplug.registry import legal_method_names

HEADER = ("option", "type", "default", "legal", "meaning")


def shared_options() -> list[tuple[str, ...]]:
    """Returns one row per option that all methods have."""
    return [
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
        *_rows(TreeOptions.__pydantic_fields__),  # type: ignore[attr-defined]
    ]


def method_options(method: Method) -> list[tuple[str, ...]]:
    """Returns one row per option that this method declares."""
    return _rows(method.load_options().model_fields)


def _rows(options: Mapping[str, FieldInfo]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, info in options.items():
        type_name, span, words = describe_type(info.annotation)
        legal = ", ".join(part for part in (span, *(f"`{word}`" for word in words)) if part)
        legal = legal or bounds(info.metadata) or "any"
        default = "unset" if info.default is None else f"`{str(info.default).lower()}`"
        meaning = " ".join((info.description or "").split())
        rows.append((f"`{name}`", type_name, default, legal, meaning))
    return rows
