# SPDX-License-Identifier: Apache-2.0
"""A pretended CUDA device on a CPU that keeps the order of streams, and no other.

While it is entered, `torch.device("cuda")` is a device: tensors made on it say so, `Tensor.to`,
`pin_memory`, streams, events and `record_stream` are as on CUDA, and mapped host memory (UVA) has
two addresses. Everything is run at once, in the order it is asked for; which of it a device might
have run in another order is found by `stream_order`, from every read and write: of torch's
operations by their schemas, of Triton's interpreter by the addresses that it loads and stores, of
the host by its operations on pinned tensors and on their NumPy arrays (`host_array`).

- A copy from pinned memory with `non_blocking=True` reads it on its stream. From pageable memory it
  is staged at once, and the host does not learn of the stream by it.
- A copy to pinned memory with `non_blocking=True` writes on its stream: until the host has learnt
  that it is done, all bits there are set.
- Reading on the host waits for the stream: `item`, a blocking copy, shapes that follow from values.
- An event has passed once a number of others were recorded behind it, some two steps of a runner.
- An operation on tensors of both sides is an error, as on CUDA.

Not modelled: overlap within one stream (there is none on a device), other processes and devices,
peer copies, priorities, more than one thread of the host, memory that graphs of one pool share (see
`pretended_graph`), what native code reads or writes of pinned memory, values in the caches of a
device that a host has not flushed, and where torch waits although it need not (`cudaMalloc`).
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.device_functions import DEVICE, DeviceFunctions
from tests.device_modes import Functions, Operations, arguments_of, noting_kernels
from tests.pretended_graph import PretendedGraph, is_host_sized, tensors_of
from tests.stream_order import Clock, Memory, Region, StreamOrder, here

# Events behind one that has passed, and how often a host asks in vain that does nothing else.
LATE_EVENTS, MOST_QUERIES = 12, 100
_aten = torch.ops.aten
# What looks at the shape of a tensor alone.
_SHAPE_OF = {
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like,
    _aten.randn_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full,
    _aten.new_empty_strided,
}  # fmt: skip
_UNWRITTEN = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
# What tensors are, and no memory.
_HANDLES = {_aten._has_compatible_shallow_copy_type, _aten.set_data, _aten.set_}
# They take indices of the host, and wait for them.
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class DeviceError(RuntimeError):
    """What CUDA refuses."""


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.owner = PretendedDevice.last
        self.actor = self.owner.order.stream()
        self.device, self.cuda_stream = DEVICE, self.actor.number

    def wait_event(self, event: Event) -> None:
        self.actor.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.actor.learn(other.actor.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.owner.order.host_learns(self.actor.clock)

    def __enter__(self) -> Stream:
        self.before, self.owner.current = self.owner.current, self
        return self

    def __exit__(self, *error: Any) -> None:
        self.owner.current = self.before


class Event:
    """In place of `torch.cuda.Event`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.owner = PretendedDevice.last
        self.clock: Clock = {}
        self.number, self.asked, self.time = 0, 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        actor = (stream or self.owner.current).actor
        self.owner.order.launch(actor)
        self.owner.recorded += 1
        self.number, self.asked = self.owner.recorded, 0
        self.clock, self.time = dict(actor.clock), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.owner.current).wait_event(self)

    def synchronize(self) -> None:
        self.owner.order.host_learns(self.clock)

    def query(self) -> bool:
        self.asked += 1
        behind = self.owner.recorded - self.number
        host = self.owner.order.host.clock
        is_known = all(host.get(actor, 0) >= tick for actor, tick in self.clock.items())
        if not is_known and behind < LATE_EVENTS and self.asked < MOST_QUERIES:
            return False
        self.synchronize()
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)


class PretendedDevice:
    """The device of this process; see the module."""

    last: PretendedDevice

    def __init__(self) -> None:
        PretendedDevice.last = self
        self.order = StreamOrder()
        self.memory = Memory()
        self.main = self.current = Stream()
        # Where memory is made; where an operation's arguments lie, if None.
        self.placing: torch.device | None = None
        # Events, so far.
        self.recorded = 0
        self.is_paused = False
        self.is_entered = False
        # What is read is read by a kernel, not by the host.
        self.is_one_kernel = False
        # On their way to the host: stream, its time, where to, and what.
        self._coming: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self._watched: dict[int, weakref.ref[Any]] = {}
        # The second mapping of pinned memory, by its address, and what is mapped by that one's.
        self._aliases: dict[int, Any] = {}
        self._mapped: dict[int, torch.Tensor] = {}
        self.order.on_learnt.append(self._deliver)
        self.functions = DeviceFunctions(self).table
        # Of the running launch: ranges by region and whether it is written.
        self._launched: dict[tuple[int, bool], list[Any]] | None = None

    # -- memory -----------------------------------------------------------------------------

    def region_of(self, tensor: torch.Tensor) -> tuple[Region, int, bool] | None:
        try:
            return self.memory.find(tensor.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):
            return None

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        found = self.region_of(tensor)
        return found is not None and found[2]

    def adopt(self, tensor: torch.Tensor) -> None:
        """Makes the memory of a tensor the device's."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            # Its place tells whose it is.
            storage.resize_(1)
        owner = self.current.actor
        self.order.reuse(owner)
        region = Region("device", owner, storage.nbytes(), here())
        self._watch(storage, region, on_device=True)

    def _watch(self, storage: Any, region: Region, on_device: bool) -> None:
        address = storage.data_ptr()
        self.memory.add(address, region, on_device)

        def gone(_: Any) -> None:
            del self._watched[address]
            self.memory.remove(address, region)
            self.order.free(region)

        self._watched[address] = weakref.ref(storage, gone)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is run here is nobody's."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextmanager
    def placed_on(self, device: torch.device | None) -> Iterator[None]:
        """Memory is made there."""
        before, self.placing = self.placing, device
        try:
            yield
        finally:
            self.placing = before

    def pinned_empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory, which has a second address for the device."""
        size = torch.Size(shape).numel() * dtype.itemsize
        descriptor = os.memfd_create("pinned")
        try:
            os.ftruncate(descriptor, max(1, size))
            ours, theirs = (mmap.mmap(descriptor, max(1, size)) for _ in range(2))
        finally:
            os.close(descriptor)
        with self.paused():
            whole = torch.frombuffer(ours, dtype=torch.uint8)
            tensor = whole[:size].view(dtype).view(shape)
            storage = tensor.untyped_storage()
            region = Region("pinned", self.order.host, storage.nbytes(), here())
            self._watch(storage, region, on_device=False)
            self._aliases[storage.data_ptr()] = theirs
            weakref.finalize(storage, self._aliases.pop, storage.data_ptr(), None)
        return tensor

    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = self.pinned_empty(tensor.shape, tensor.dtype)
        with self.paused():
            copy.copy_(tensor)
        return copy

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory as the device sees it."""
        found = self.region_of(tensor)
        assert found is not None and found[0].kind == "pinned", "mapping needs pinned memory"
        region, start, _ = found
        region.is_mapped = True
        with self.paused():
            whole = torch.frombuffer(self._aliases[start], dtype=torch.uint8)
            storage = whole.untyped_storage()
            address = storage.data_ptr()
            self.memory.add(address, region, on_device=True)
            self._mapped[address] = tensor
            weakref.finalize(storage, self._unmap, address, region)
            offset, size = tensor.data_ptr() - start, tensor.numel() * tensor.itemsize
            return whole[offset : offset + size].view(tensor.dtype).view(tensor.shape)

    def _unmap(self, address: int, region: Region) -> None:
        self.memory.remove(address, region)
        self._mapped.pop(address, None)

    # -- accesses ---------------------------------------------------------------------------

    def touch(self, actor: Any, tensor: torch.Tensor, writes: bool) -> None:
        """An access of what was last launched on `actor`."""
        found = self.region_of(tensor)
        if found is None or not tensor.numel():
            return
        region, start, _ = found
        first = tensor.data_ptr() - start
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * abs(stride) for size, stride in sizes)
        self.order.access(actor, region, first, first + (last + 1) * tensor.itemsize, writes)

    def host_noted(self, address: int, end: int, writes: bool) -> None:
        """`HostArray.noted`."""
        found = self.memory.find(address)
        if found is not None:
            self.order.launch(self.order.host)
            self.order.access(self.order.host, found[0], address - found[1], end - found[1], writes)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of torch's, below all that is written in Python."""
        if func is _aten.copy_.default and self._crosses(args[0], args[1]):
            return self._cross(*args, **kwargs)
        reads, writes = arguments_of(func, args, kwargs)
        reads_host = is_host_sized(func, args, kwargs)
        given = [*reads, *writes]
        homes = [self.region_of(t) for t in given]
        packet = func.overloadpacket
        of_shape = packet in _SHAPE_OF
        on_device = any(home is not None and home[2] for home in homes)
        if self.placing is not None and (of_shape or not given):
            on_device = self.placing == DEVICE
        if packet in _HANDLES or not (on_device or any(homes)):
            return func(*args, **kwargs)
        for tensor, home in zip(given, homes, strict=True) if on_device and not of_shape else ():
            if (home is not None and home[2]) or not tensor.dim() or not tensor.numel():
                continue
            if func.namespace != "aten":
                # A CPU's own operation, whose wrapper knows no device: its outputs are memory of
                # the device, and the rest has no counterpart.
                if any(tensor is t for t in writes):
                    self.adopt(tensor)
            elif packet in _INDEXING:
                reads_host = True
            else:
                raise DeviceError(f"{func}: tensors of the host and of the device")
        result = func(*args, **kwargs)
        made = [t for t in tensors_of(result) if self.region_of(t) is None]
        # What may be a view is a copy where strides or types want it.
        if func.is_view and not made:
            return result
        actor = self.current.actor if on_device else self.order.host
        self.order.launch(actor)
        for tensor in () if of_shape else reads:
            self.touch(actor, tensor, writes=False)
        for tensor in made if on_device else ():
            self.adopt(tensor)
        for tensor in (*writes, *(made if packet not in _UNWRITTEN else ())):
            self.touch(actor, tensor, writes=True)
        if on_device and reads_host:
            self.host_read(actor.clock)
        return result

    def host_read(self, clock: Clock) -> None:
        """The host has waited for values of a device, which knew of `clock`."""
        if not self.is_one_kernel:
            self.order.host_learns(clock)

    def one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A stand-in for a kernel, of several operations: values that it reads with `item` or
        `tolist` are nothing that the host waits for."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with patch.object(self, "is_one_kernel", True):
                return function(*args, **kwargs)

        return call

    def _crosses(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return self.is_on_device(one) != self.is_on_device(other)

    def _cross(
        self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """`to.copy_(source)` between the sides."""
        stream, host = self.current.actor, self.order.host
        upwards = self.is_on_device(to)
        near = source if upwards else to
        # Torch copies what is not contiguous through pageable memory.
        is_plain = near.is_contiguous() and to.shape == source.shape
        late = non_blocking and is_plain and self.region_of(near) is not None
        if not late:
            # Of the host's own doing, before the device's or after it.
            if not upwards:
                self.order.launch(stream)
                self.touch(stream, source, writes=False)
                self.order.host_learns(stream.clock)
            self.order.launch(host)
            self.touch(host, near, writes=not upwards)
        if upwards or late:
            self.order.launch(stream)
            if late:
                self.touch(stream, source, writes=False)
            self.touch(stream, to, writes=True)
        with self.paused():
            if upwards or not late:
                to.copy_(source)
            else:
                value = torch.empty_like(to).copy_(source)
                to.view(-1).view(torch.uint8).fill_(255)
                self._coming.append((stream.number, stream.clock[stream.number], to, value))
        if not non_blocking:
            self.order.host_learns(stream.clock)
        return to

    def _deliver(self) -> None:
        clock, coming = self.order.host.clock, self._coming
        if coming:
            self._coming = []
            with self.paused(), torch.inference_mode():
                for item in coming:
                    stream, tick, to, value = item
                    if clock.get(stream, 0) >= tick:
                        to.copy_(value)
                    else:
                        self._coming.append(item)

    # -- Triton's interpreter ---------------------------------------------------------------

    def launch(self, run: Callable[[], None]) -> None:
        """A kernel."""
        self._launched = {}
        with self.paused():
            run()
        launched, self._launched = self._launched, None
        self.order.launch(self.current.actor)
        for (_, writes), (region, first, end) in launched.items():
            self.order.access(self.current.actor, region, first, end, writes)

    def reached(self, addresses: np.ndarray, mask: np.ndarray, size: int, writes: bool) -> None:
        """Memory that a program of a launch loads or stores, `size` bytes at each address."""
        if self._launched is None or not mask.any():
            return
        picked = addresses[mask] if not mask.all() else addresses
        first, last = int(picked.min()), int(picked.max())
        found = self.memory.find(first)
        if found is None or last >= found[1] + found[0].size:
            verb = "stores" if writes else "loads"
            raise DeviceError(f"a kernel {verb} beyond memory of the device")
        region, start, on_device = found
        if not on_device:
            raise DeviceError("a kernel reaches host memory that is not mapped")
        first, end = first - start, last + size - start
        held = self._launched.setdefault((id(region), writes), [region, first, end])
        held[1], held[2] = min(held[1], first), max(held[2], end)

    # -- being the device -------------------------------------------------------------------

    @contextmanager
    def entered(self) -> Iterator[PretendedDevice]:
        """`torch.device("cuda")` is this one here."""
        with ExitStack() as stack:
            for owner, name, new in self._replaced():
                stack.enter_context(patch.object(owner, name, new))
            stack.enter_context(patch.object(self, "is_entered", True))
            stack.enter_context(Functions(self))
            stack.enter_context(Operations(self))
            yield self

    def synchronize(self, *args: Any) -> None:
        for stream in self.order.streams:
            self.order.host_learns(stream.clock)

    def _set_stream(self, stream: Stream | None) -> None:
        if stream is not None:
            self.current = stream

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        properties = SimpleNamespace(
            name="pretended",
            major=9,
            minor=0,
            multi_processor_count=8,
            shared_memory_per_block_optin=227 * 1024,
        )
        for name, new in {
            "Event": Event,
            "Stream": Stream,
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.main,
            "set_stream": self._set_stream,
            "stream": lambda stream: nullcontext() if stream is None else stream,
            "synchronize": self.synchronize,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "pretended",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: properties,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: None,
            "device": lambda device: nullcontext(),
        }.items():
            yield torch.cuda, name, new
        yield torch.accelerator, "synchronize", self.synchronize
        yield torch.Tensor, "pin_memory", _pin_memory
        yield torch.Tensor, "record_stream", record_stream
        yield PretendedGraph, "replay", _replay(PretendedGraph.replay)
        from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

        stock = InterpretedFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self.launch(lambda: stock(kernel, *args, grid=grid, warmup=warmup, **kwargs))

        yield InterpretedFunction, "run", run
        for name, new in noting_kernels(self).items():
            yield InterpreterBuilder, name, new


def _replay(stock: Any) -> Any:
    def replay(graph: Any) -> None:
        # What operations make again is the device's.
        with PretendedDevice.last.placed_on(DEVICE):
            stock(graph)

    return replay


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    owner = PretendedDevice.last
    if (found := owner.region_of(tensor)) is None:
        return owner.pinned_copy(tensor)
    if found[2]:
        raise DeviceError("memory of the device is not pinned")
    return tensor


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """In place of `Tensor.record_stream`."""
    found = PretendedDevice.last.region_of(tensor)
    assert found is not None
    found[0].recorded.add(stream.actor.number)


def on_the_device_too(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation's Python, which torch calls without the mode that its caller is in."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = PretendedDevice.last
        if not device.is_entered or device.is_paused:
            return function(*args, **kwargs)
        with Functions(device):
            return function(*args, **kwargs)

    return call
