# SPDX-License-Identifier: Apache-2.0
"""How a pretended device sees what is run: modes of torch, and loads and stores of Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.utils._device as torch_device
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device_functions import HOST, side
from tests.pretended_graph import is_python, tensors_of

_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class Functions(TorchFunctionMode):
    """Where tensors are, and where they are made."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = self.device
        if device.is_paused or isinstance(func, _OPERATIONS):
            return func(*args, **kwargs)
        if (special := device.functions.get(func)) is not None:
            return special(*args, **kwargs)
        asked = kwargs.get("device")
        if asked is None and func in torch_device._device_constructors():
            # Its mode comes after this one.
            asked = torch_device.CURRENT_DEVICE
        if asked is None and not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        kwargs = dict(kwargs)
        pins = kwargs.pop("pin_memory", False)
        where = device.placing
        if asked is not None:
            where = side(asked)
            kwargs["device"] = HOST
        with device.placed_on(where):
            made = func(*args, **kwargs)
        return device.pinned_copy(made) if pins else made


class Operations(TorchDispatchMode):
    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.device.is_paused:
            return func(*args, **kwargs)
        if is_python(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self.device.run(func, args, kwargs)


@cache
def _written(func: Any) -> tuple[tuple[bool, ...], dict[str, bool]]:
    """Which arguments an operation writes, by place and by name."""
    schema = func._schema.arguments
    flags = [a.alias_info is not None and a.alias_info.is_write for a in schema]
    return tuple(flags), {a.name: flag for a, flag in zip(schema, flags, strict=True)}


def arguments_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation is given: those it reads, and those it writes."""
    by_place, by_name = _written(func)
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for flag, value in (
        *zip(by_place, args, strict=False),
        *((by_name[name], value) for name, value in kwargs.items()),
    ):
        if isinstance(value, (torch.Tensor, list, tuple)):
            (writes if flag else reads).extend(tensors_of(value))
    return reads, writes


def _noting(device: Any, stock: Any, place: int, writes: bool) -> Any:
    """
    Args:
        place: the mask's, behind the pointers.
    """

    def call(self: Any, ptrs: Any, *rest: Any) -> Any:
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        mask = np.asarray(rest[place].data, bool)
        device.reached(ptrs.data, mask, size, writes)
        return stock(self, ptrs, *rest)

    return call


def _noting_atomics(device: Any, stock: Any) -> Any:
    def call(self: Any, *args: Any) -> Any:
        ptrs = next(a for a in args if hasattr(a, "get_element_ty"))
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        device.reached(ptrs.data, np.ones(np.shape(ptrs.data), bool), size, True)
        return stock(self, *args)

    return call


def noting_kernels(device: Any) -> dict[str, Callable[..., Any]]:
    """Methods of Triton's `InterpreterBuilder` that tell a device what kernels reach."""
    from triton.runtime.interpreter import InterpreterBuilder

    stock: Any = InterpreterBuilder
    return {
        "create_masked_load": _noting(device, stock.create_masked_load, 0, False),
        "create_masked_store": _noting(device, stock.create_masked_store, 1, True),
        "create_atomic_cas": _noting_atomics(device, stock.create_atomic_cas),
        "create_atomic_rmw": _noting_atomics(device, stock.create_atomic_rmw),
    }
