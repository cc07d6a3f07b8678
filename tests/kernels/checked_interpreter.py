# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter with the checks of a hostile device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils import deterministic

from vllm_specplug.kernels.kv_compact_triton import LayerCaches

# Per launch: ascending first addresses of its tensors' memory, and the ends.
_Ranges = tuple[np.ndarray, np.ndarray]


@contextmanager
def checked_interpreter() -> Iterator[None]:
    """While entered:

    - an access outside the tensors of a launch, or of its `LayerCaches`, is an error;
    - a lane that does not load, and for which the kernel names no other value, gets NaN or -1, as a
      GPU promises nothing and the stock interpreter gives 0;
    - memory that torch allocates and does not fill is NaN or the largest integer;
    - bfloat16 factors of a matrix product are numbers; the stock interpreter multiplies their bits;
    - numbers are rounded to bfloat16; the stock interpreter cuts float32, and takes integers for
      bits.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

    # What launches reach by addresses in memory.
    layers: list[torch.Tensor] = []
    running: list[_Ranges] = []
    stock: Any = InterpreterBuilder
    stock_run, of = InterpretedFunction.run, LayerCaches.of
    load, store, rmw, cas, cast, dot = (
        stock.create_masked_load, stock.create_masked_store, stock.create_atomic_rmw,
        stock.create_atomic_cas, stock.cast_impl, stock.create_dot,
    )  # fmt: skip

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values(), *layers) if isinstance(a, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        starts = np.array(sorted(storages), np.uint64)
        ends = np.array([s + storages[s] for s in sorted(storages)], np.uint64)
        running.append((starts, ends))
        try:
            return stock_run(kernel, *args, **kwargs)
        finally:
            running.pop()

    def check(ptrs: Any, mask: np.ndarray | None) -> None:
        addresses = np.asarray(ptrs.data, np.uint64)
        addresses = addresses.ravel() if mask is None else addresses[np.asarray(mask, bool)]
        starts, ends = running[-1]
        at = np.searchsorted(starts, addresses, side="right") - 1
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        assert ((at >= 0) & (addresses + np.uint64(size) <= ends[at])).all(), (
            "an access outside the tensors of the launch"
        )

    def checked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        check(ptrs, mask.data)
        loaded = load(self, ptrs, mask, other, *rest)
        if other is None:
            bits = loaded.data.view(f"u{loaded.data.itemsize}")
            bits[~np.asarray(mask.data, bool)] = np.iinfo(bits.dtype).max
        return loaded

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs, mask.data)
        return store(self, ptrs, value, mask, *rest)

    def checked_rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(ptr, mask.data)
        return rmw(self, op, ptr, value, mask, *rest)

    def checked_cas(self: Any, ptr: Any, *rest: Any) -> Any:
        check(ptr, None)
        return cas(self, ptr, *rest)

    def rounded_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar != tl.bfloat16 or src.dtype.scalar == tl.bfloat16:
            return cast(self, src, dst_type)
        numbers = torch.from_numpy(np.asarray(src.data, np.float32)).bfloat16()
        return TensorHandle(numbers.view(torch.uint16).numpy(), tl.bfloat16)

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        bits = factor.data.view(np.uint16).astype(np.uint32)
        return TensorHandle((bits << np.uint32(16)).view(np.float32), tl.float32)

    def numeric_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def remembered(views: Any) -> LayerCaches:
        layers.extend(half for pair in views for half in pair)
        return of(views)

    replaced: dict[tuple[Any, str], Any] = {
        (InterpretedFunction, "run"): run,
        (stock, "create_masked_load"): checked_load,
        (stock, "create_masked_store"): checked_store,
        (stock, "create_atomic_rmw"): checked_rmw,
        (stock, "create_atomic_cas"): checked_cas,
        (stock, "cast_impl"): rounded_cast,
        (stock, "create_dot"): numeric_dot,
        (LayerCaches, "of"): staticmethod(remembered),
    }
    was_filled = deterministic.fill_uninitialized_memory
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as stack:
        for (owner, name), new in replaced.items():
            stack.enter_context(patch.object(owner, name, new))
        stack.callback(setattr, deterministic, "fill_uninitialized_memory", was_filled)
        stack.callback(torch.use_deterministic_algorithms, was_deterministic)
        deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True)
        yield
