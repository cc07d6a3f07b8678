# SPDX-License-Identifier: Apache-2.0
"""torch's functions on a pretended device: where tensors are, how they move, what a host reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device as torch_device

from tests.host_array import HostArray

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")
_Tensor: Any = torch.Tensor


def side(device: Any) -> torch.device:
    """The device that is meant."""
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    return DEVICE if kind == "cuda" else torch.device(kind)


class DeviceFunctions:
    """What `PretendedDevice` answers in torch's place."""

    def __init__(self, device: Any) -> None:
        self.device = device
        at = device.is_on_device
        self.table: dict[Any, Callable[..., Any]] = {
            _Tensor.device.__get__: lambda t, *rest: self.where(t),
            _Tensor.is_cuda.__get__: lambda t, *rest: at(t),
            _Tensor.is_cpu.__get__: lambda t, *rest: self.where(t) == HOST,
            _Tensor.get_device: lambda t: 0 if at(t) else -1,
            _Tensor.is_pinned: self.is_pinned,
            _Tensor.to: self.to,
            _Tensor.cpu: lambda t, *rest: self.to(t, HOST),
            _Tensor.cuda: lambda t, device=None, non_blocking=False: self.to(
                t, DEVICE, non_blocking=non_blocking
            ),
            _Tensor.numpy: self.numpy,
            _Tensor.tolist: self.tolist,
            _Tensor.new_tensor: self.new_tensor,
            torch.tensor: lambda *args, **kwargs: self.made(torch.tensor, *args, **kwargs),
            torch.as_tensor: lambda *args, **kwargs: self.made(torch.as_tensor, *args, **kwargs),
            torch._C._nn._parse_to: torch._C._nn._parse_to,
        }

    def where(self, tensor: torch.Tensor) -> torch.device:
        """`Tensor.device`."""
        return DEVICE if self.device.is_on_device(tensor) else _Tensor.device.__get__(tensor)

    def to(self, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        """`Tensor.to`."""
        if "other" in kwargs:
            args = kwargs.pop("other"), *args
        if args and isinstance(args[0], torch.Tensor):
            args = self.where(args[0]), args[0].dtype, *args[1:]
        asked, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        here, there = self.where(tensor), None if asked is None else side(asked)
        if there is None or there == here or here.type == "meta":
            more = {} if layout is None else {"memory_format": layout}
            return _Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy, **more)
        if there.type == "meta":
            return _Tensor.to(tensor, there, dtype or tensor.dtype)
        if there == HOST and non_blocking:
            made = self.device.pinned_empty(tensor.shape, dtype or tensor.dtype)
        else:
            with self.device.placed_on(there):
                made = torch.empty_like(tensor, dtype=dtype or tensor.dtype, device=HOST)
        return made.copy_(tensor, non_blocking=non_blocking)

    def made(
        self,
        stock: Any,
        data: Any,
        dtype: Any = None,
        device: Any = None,
        pin_memory: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`torch.tensor` and `torch.as_tensor`."""
        device = torch_device.CURRENT_DEVICE if device is None else device
        if isinstance(data, torch.Tensor):
            return self.to(data, device, dtype)  # type: ignore[no-any-return]
        made = stock(data, dtype=dtype, device=HOST, **kwargs)
        if pin_memory:
            made = self.device.pinned_copy(made)
        return made if device is None else self.to(made, device)  # type: ignore[no-any-return]

    def new_tensor(
        self, tensor: torch.Tensor, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """`Tensor.new_tensor`."""
        device = self.where(tensor) if device is None else device
        return self.made(torch.tensor, data, dtype or tensor.dtype, device)

    def is_pinned(self, tensor: torch.Tensor, device: Any = None) -> bool:
        """`Tensor.is_pinned`."""
        found = self.device.region_of(tensor)
        return found is not None and not found[2]

    def numpy(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        """`Tensor.numpy`."""
        found = self.device.region_of(tensor)
        if found is None:
            return _Tensor.numpy(tensor, **kwargs)
        if found[2]:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        with self.device.paused():
            made = _Tensor.numpy(tensor).view(HostArray)
        made.noted = self.device.host_noted
        return made

    def tolist(self, tensor: torch.Tensor) -> Any:
        """`Tensor.tolist`, which no mode of operations sees."""
        device, order = self.device, self.device.order
        actor = device.current.actor if device.is_on_device(tensor) else order.host
        order.launch(actor)
        device.touch(actor, tensor, writes=False)
        if actor is not order.host:
            device.host_read(actor.clock)
        return _Tensor.tolist(tensor)
