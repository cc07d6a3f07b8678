# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without work that has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """While entered, the interpreter computes the same numbers in a third of the time:

    - It patches Triton's language once. The stock interpreter does so for each launch and for each
      function that a kernel calls.
    - It computes sums and products of int32 in 32 bits only. The stock interpreter also computes
      them in 64 bits and compares them, but asserts nothing unless Triton debugs.
    - It finds once what a type determines: shape, size and numpy's dtype.
    - It neither copies a type that it has nor broadcasts blocks of one shape.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder, unchanged = interpreter.interpreter_builder, interpreter._LangPatchScope()
    stock_tensor, stock_dtype = tl.tensor.__init__, interpreter._get_np_dtype
    stock_block = tl.block_type.with_element_ty
    stock_broadcast = TritonSemantic.broadcast_impl_value
    # By the type's name.
    shapes: dict[str, tuple[Any, Any]] = {}
    dtypes: dict[str, Any] = {}

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in shapes:
            stock_tensor(self, handle, kind)
            shapes[kind.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[kind.name]

    def dtype(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = stock_dtype(kind)
        return dtypes[kind.name]

    def block(self: Any, kind: Any) -> Any:
        return self if kind is self.element_ty else stock_block(self, kind)

    def broadcast(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
        are_blocks = a.type.is_block() and b.type.is_block()
        if are_blocks and a.type.shape.values == b.type.shape.values:
            return a, b
        return stock_broadcast(self, a, b)

    replaced: dict[tuple[Any, str], Any] = {
        (interpreter, "_patch_lang"): lambda function: unchanged,
        (builder, "options"): replace(builder.options, sanitize_overflow=False),
        (tl.tensor, "__init__"): tensor,
        (interpreter, "_get_np_dtype"): dtype,
        (tl.block_type, "with_element_ty"): block,
        (tl.block_type, "to_ir"): lambda self, builder: self,
        (TritonSemantic, "broadcast_impl_value"): broadcast,
    }
    with ExitStack() as stack:
        language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        stack.callback(interpreter._patch_lang(language).restore)
        for (owner, name), new in replaced.items():
            stack.enter_context(patch.object(owner, name, new))
        yield
