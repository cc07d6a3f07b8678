# SPDX-License-Identifier: Apache-2.0
"""What the pretended device reports as a race; `tests/e2e/cuda/test_streams.py` runs whole engines
on it, in which nothing that is ordered may be reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.pretended_device import DEVICE, LATE_EVENTS, PretendedDevice
from vllm_specplug.kernels import pinned, to_device
from vllm_specplug.vllm_v2.host_step import HostCopy

ROOM = 64


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    with PretendedDevice().entered() as made:
        yield made


def found(device: PretendedDevice) -> list[str]:
    return [str(race) for race in device.order.races]


def _pass() -> None:
    """The host waits for what was launched, by an event."""
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def test_a_pinned_buffer_is_read_late(device: PretendedDevice) -> None:
    for waits in (True, False):
        host = torch.zeros(ROOM, dtype=torch.int32, pin_memory=True)
        array, there = host.numpy(), torch.empty(ROOM, dtype=torch.int32, device=DEVICE)
        assert host.is_pinned() and not there.is_pinned()
        for step in range(3):
            array[: ROOM // 2] = step
            there.copy_(host, non_blocking=True)
            # What nothing reads may be written.
            if waits:
                _pass()
        races = found(device)
        assert (not races) == waits, races
    assert all("race in pinned memory" in race for race in races)
    assert all(race.count("test_pretended_device.py:") >= 3 for race in races), races
    assert "stream 1 reads bytes 0 to 256" in races[0] and "host writes bytes 0 to 128" in races[0]


@pytest.mark.parametrize("written", [
    lambda t: t.fill_(1), lambda t: t.numpy().fill(1), lambda t: t[3:].add_(1),
    lambda t: np.add(t.numpy(), 1, out=t.numpy()), lambda t: np.copyto(t.numpy(), 3),
    lambda t: torch.from_numpy(t.numpy()[4:6]).fill_(2), lambda t: t.copy_(torch.ones(ROOM)),
])  # fmt: skip
def test_every_way_to_write_is_seen(
    device: PretendedDevice, written: Callable[[torch.Tensor], None]
) -> None:
    host = torch.ones(ROOM, dtype=torch.int32).pin_memory()
    there = host.to(DEVICE, non_blocking=True)
    assert there.tolist() == [1] * ROOM
    written(host)
    assert found(device) == []
    host.to(DEVICE, non_blocking=True)
    written(host)
    assert len(found(device)) == 1


def test_a_copy_to_the_host_comes_late(device: PretendedDevice) -> None:
    there = torch.arange(ROOM, device=DEVICE)
    for read in (lambda t: t.tolist(), lambda t: t.numpy().tolist(), lambda t: t.numpy()[0],
                 lambda t: (t + 1).tolist(), lambda t: (t.numpy() + 1)):  # fmt: skip
        early = there.to("cpu", non_blocking=True)
        # All bits set.
        assert np.all(np.equal(np.ravel(read(early))[:1], -1)) or np.ravel(read(early))[0] == 0
        assert len(found(device)) >= 1 and "stream 1 writes" in found(device)[0]
        device.order.races.clear()
        _pass()
        assert early.tolist() == list(range(ROOM)) and found(device) == []


@pytest.mark.parametrize("read", [lambda t: t[0].item(), lambda t: t.tolist()])
def test_what_a_stand_in_for_a_kernel_reads_the_host_does_not_learn(
    device: PretendedDevice, read: Callable[[torch.Tensor], object]
) -> None:
    for reading in (read, device.one_kernel(read)):
        host = torch.zeros(ROOM, pin_memory=True)
        reading(host.to(DEVICE, non_blocking=True))
        host.fill_(1)
        assert bool(found(device)) == (reading is not read)


def test_an_event_that_has_passed_was_waited_for(device: PretendedDevice) -> None:
    host = torch.zeros(ROOM).pin_memory()
    host.to(DEVICE, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    for _ in range(LATE_EVENTS):
        assert not event.query()
        torch.cuda.Event().record()
    assert event.query()
    host.fill_(1)
    assert found(device) == []
    # It knows nothing of what came behind it.
    host.to(DEVICE, non_blocking=True)
    event.synchronize()
    host.fill_(1)
    assert len(found(device)) == 1


def _copied_aside(orders: Callable[[torch.cuda.Stream, torch.cuda.Stream], object]) -> torch.Tensor:
    """What vLLM's output copies do: read on a stream of their own."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    made = torch.arange(ROOM, device=DEVICE) * 2
    orders(main, side)
    with torch.cuda.stream(side):
        copy = made.to("cpu", non_blocking=True)
        event = side.record_event()
    event.synchronize()
    return copy


@pytest.mark.parametrize("orders", [
    lambda main, side: None, lambda main, side: main.wait_stream(side),
    lambda main, side: side.wait_event(torch.cuda.Event()),
])  # fmt: skip
def test_a_missing_wait_is_found(
    device: PretendedDevice, orders: Callable[[torch.cuda.Stream, torch.cuda.Stream], object]
) -> None:
    _copied_aside(orders)
    races = found(device)
    assert len(races) == 1 and "stream 1 writes" in races[0] and "stream 2 reads" in races[0]


@pytest.mark.parametrize("keeps", ["record_stream", "wait", "nothing"])
def test_memory_is_not_used_again_while_it_is_read(device: PretendedDevice, keeps: str) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    made = torch.arange(ROOM, device=DEVICE)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        made + 1
        if keeps == "record_stream":
            made.record_stream(side)
    del made
    if keeps == "wait":
        main.wait_stream(side)
    assert found(device) == []
    torch.zeros(ROOM, device=DEVICE)
    races = found(device)
    assert len(races) == (keeps == "nothing")
    assert not races or "freed early" in races[0] and "stream 2 reads" in races[0]


def test_mapped_memory_is_read_whenever_a_kernel_runs(device: PretendedDevice) -> None:
    host = torch.zeros(ROOM, dtype=torch.int32).pin_memory()
    there = device.mapped(host)
    array = host.numpy()
    assert there.is_cuda and host.is_cpu
    array[:] = 3
    assert (there * 2).tolist() == [6] * ROOM
    copy = there.clone()
    array[3] = 4
    races = found(device)
    assert len(races) == 1 and "pinned" in races[0] and copy.tolist() == [3] * ROOM
    device.order.races.clear()
    there.clone()
    # The host's allocator knows nothing of kernels that read it.
    del host, array, there
    assert len(found(device)) == 1 and "mapped memory freed early" in found(device)[0]


def test_kernels_by_what_they_load_and_store(device: PretendedDevice) -> None:
    tl = pytest.importorskip("triton.language")
    from triton.runtime.interpreter import InterpretedFunction

    def double(source, to, count, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.arange(0, ROOM)
        tl.store(to + place, 2 * tl.load(source + place, mask=place < count), mask=place < count)

    kernel = InterpretedFunction(double)
    host = torch.ones(ROOM).pin_memory()
    to, side = torch.zeros(ROOM, device=DEVICE), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    kernel[(1,)](device.mapped(host), to, 8, ROOM=ROOM)
    host[8:] = 5
    with torch.cuda.stream(side):
        to[8:].clone()
    assert found(device) == []
    host[7] = 5
    assert len(found(device)) == 1 and "stream 1 reads bytes 0 to 32" in found(device)[0]
    with torch.cuda.stream(side):
        to[7:].clone()
    assert len(found(device)) == 2 and "stream 1 writes bytes 0 to 32" in found(device)[1]
    with pytest.raises(Exception, match="not mapped"):
        kernel[(1,)](host, to, 8, ROOM=ROOM)


# -- what the package does --------------------------------------------------------------------


def test_copies_to_the_device_keep_their_memory(device: PretendedDevice) -> None:
    values = np.arange(ROOM)
    for step in range(3):
        values[:] = step
        assert to_device(values, DEVICE).tolist() == [step] * ROOM
        to_device(values, DEVICE)
    assert found(device) == []
    # The control: a pinned buffer of one's own.
    kept = pinned(values, DEVICE)
    for step in range(2):
        kept.numpy()[:] = step
        to_device(kept, DEVICE)
    assert len(found(device)) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_what_the_host_reads_of_a_step_has_come(device: PretendedDevice, waits: bool) -> None:
    there = torch.arange(ROOM, device=DEVICE)
    copy = HostCopy(there)
    # What the device does next does not reach it.
    there.fill_(7)
    assert not copy.has_arrived
    if not waits:
        copy._event = None
    assert (copy.read().tolist() == list(range(ROOM))) == waits
    assert (found(device) == []) == waits
