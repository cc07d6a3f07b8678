# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of one Hopper kernel on the CPU, a thread block at a time, with numpy.

It knows the instructions that our kernels use, no others: an unknown one is an error. It is meant
to be hostile where the hardware may be:

    shared memory starts as NaN, and every access to memory is checked against what was allocated;
    asynchronous copies and matrix products take effect at once, or only when they are waited for,
    as the `Timing` says, which shows a missing wait or a buffer reused too early;
    warpgroups run one after the other between barriers, in either order.

What it cannot show: missing fences between memory proxies, and what ptxas makes of the PTX.

All threads of a warpgroup step together under a mask (lowest program counter first); registers
are arrays of 128. The meaning of each instruction follows the PTX ISA manual.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tests.kernels.ptx_arithmetic import LANES, Arithmetic, Warpgroup
from tests.kernels.ptx_memory import (
    GLOBAL_BASE,
    PARAM_BASE,
    SHARED_BASE,
    Barrier,
    GlobalMemory,
    TensorMap,
)
from tests.kernels.ptx_program import Program


@dataclass(frozen=True)
class Timing:
    """When asynchronous work takes effect: at issue (True) or when waited for."""

    eager_copies: bool = False
    eager_products: bool = True
    reverse_warpgroups: bool = False


class Machine:
    """Runs blocks of one program. Statistics: instructions by opcode in `counts`."""

    def __init__(
        self,
        ptx: str,
        memory: GlobalMemory,
        shared_bytes: int,
        timing: Timing = Timing(),
    ) -> None:
        self.program = Program(ptx)
        self.memory = memory
        self.shared_bytes = shared_bytes
        self.timing = timing
        self.counts: dict[str, int] = {}

    def launch(self, grid: tuple[int, int, int], params: list) -> None:
        """Runs every block; params are integers, floats and `TensorMap`s, in order."""
        assert len(params) == len(self.program.params), (len(params), len(self.program.params))
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    _Block(self, (x, y, z), grid, params).run()


class _Block(Arithmetic):
    def __init__(self, machine: Machine, index, grid, params) -> None:
        self.machine = machine
        self.program = machine.program
        self.memory = machine.memory
        self.timing = machine.timing
        self.index = dict(zip("xyz", index, strict=True))
        self.grid = dict(zip("xyz", grid, strict=True))
        self.shared = np.full(machine.shared_bytes, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.param_values = {}
        self.maps: dict[int, TensorMap] = {}
        for number, ((name, size), value) in enumerate(
            zip(self.program.params, params, strict=True)
        ):
            if isinstance(value, TensorMap):
                assert size == 128
                address = PARAM_BASE + 128 * number
                self.maps[address] = value
                self.param_values[name] = address
            elif isinstance(value, float):
                self.param_values[name] = int(np.float32(value).view(np.uint32))
            else:
                self.param_values[name] = int(value) & (2 ** (8 * size) - 1)
        count = self.program.threads // LANES
        assert count * LANES == self.program.threads
        self.groups = [Warpgroup(i * LANES) for i in range(count)]

    # -- scheduling

    def run(self) -> None:
        order = self.groups[::-1] if self.timing.reverse_warpgroups else self.groups
        with np.errstate(all="ignore"):
            while not all(g.done.all() for g in self.groups):
                progress = False
                for group in order:
                    progress |= self._advance(group)
                waiting = [g.at_barrier | g.done for g in self.groups]
                if all(w.all() for w in waiting):
                    for group in self.groups:
                        progress |= bool(group.at_barrier.any())
                        group.pc[group.at_barrier] += 1
                        group.at_barrier[:] = False
                if not progress:
                    raise RuntimeError(f"deadlock in block {self.index}")
        for group in self.groups:
            assert not group.open_products and not group.product_groups, "products left unwaited"

    def _advance(self, group: Warpgroup) -> bool:
        """Steps a warpgroup until all its threads wait or are done."""
        moved = False
        while True:
            runnable = ~(group.done | group.at_barrier)
            if not runnable.any():
                return moved
            low = group.pc[runnable].min()
            mask = runnable & (group.pc == low)
            group.polling = False
            self._step(group, int(low), mask)
            group.executed += 1
            if group.executed > 5_000_000:
                raise RuntimeError("too many instructions: an endless loop?")
            if group.polling:
                return moved
            moved = True

    def _step(self, group: Warpgroup, at: int, mask: np.ndarray) -> None:
        guard, opcode, operands = self.program.code[at]
        counts = self.machine.counts
        counts[opcode] = counts.get(opcode, 0) + 1
        taken = mask
        if guard is not None:
            condition = group.registers[guard[0]].astype(bool)
            taken = mask & (~condition if guard[1] else condition)
        name, *suffix = opcode.split(".")
        if name == "bra":
            target = self._target(operands[0], at)
            group.pc[mask] += 1
            group.pc[taken] = target
            return
        assert guard is None, f"guarded {opcode}"
        if name == "ret":
            group.done[mask] = True
            return
        if opcode == "bar.sync":
            group.at_barrier[mask] = True
            return
        handler = getattr(self, "_" + name, None)
        if handler is None:
            raise NotImplementedError(f"{opcode} {operands}")
        handler(group, suffix, operands, mask)
        if not group.polling:
            group.pc[mask] += 1

    def _target(self, label: str, at: int) -> int:
        return self.program.labels[label]

    # -- memory

    def _locate(self, space: str, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(memory, [n, size] byte indices), checked."""
        assert (address % size == 0).all(), f"misaligned {space} access of {size} bytes"
        if space == "global":
            index = address[:, None] - GLOBAL_BASE + np.arange(size)
            assert (index >= 0).all() and (index < self.memory.bytes.size).all(), "wild address"
            assert self.memory.owned[index].all(), "access outside every allocation"
            return self.memory.bytes, index
        index = address[:, None] - SHARED_BASE + np.arange(size)
        assert (index >= 0).all() and (index < self.shared.size).all(), "shared memory overrun"
        return self.shared, index

    def _ld(self, group, suffix, operands, mask) -> None:
        space, kind = suffix[0], suffix[-1]
        bits = int(kind[1:])
        if space == "param":
            value = self._read(group, operands[1].strip("[]"), bits)
            self._write(group, operands[0], value, mask)
            return
        lanes = self._vector(operands[0])
        size = bits // 8 * len(lanes)
        address = self._address(group, operands[1], 64 if space == "global" else 32)
        store, index = self._locate(space, address[mask], size)
        loaded = store[index].view({16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])
        for i, name in enumerate(lanes):
            full = np.zeros(LANES, loaded.dtype)
            full[mask] = loaded[:, i]
            self._write(group, name, full, mask)

    def _st(self, group, suffix, operands, mask) -> None:
        space, bits = suffix[0], int(suffix[-1][1:])
        lanes = self._vector(operands[1])
        values = np.stack([self._read(group, name, bits) for name in lanes], axis=1)[mask]
        address = self._address(group, operands[0], 64 if space == "global" else 32)
        store, index = self._locate(space, address[mask], bits // 8 * len(lanes))
        store[index] = np.ascontiguousarray(values).view(np.uint8)

    @staticmethod
    def _vector(operand: str) -> list[str]:
        return [o.strip() for o in operand.strip("{}").split(",")]

    # -- within a warp

    def _shfl(self, group, suffix, operands, mask) -> None:
        self._whole_warps(mask)
        kind = suffix[1]
        value = self._read(group, operands[1], 32)
        lane = np.arange(LANES)
        argument = self._read(group, operands[2], 32).astype(np.int64)
        assert operands[4] in ("-1", "0xffffffff"), operands
        assert operands[3] == ("0" if kind == "up" else "31"), operands
        lower = lane % 32 - argument
        # Below the first lane there is nothing: each keeps its own.
        up = np.where(lower >= 0, lower, lane % 32)
        source = {"idx": argument, "bfly": (lane % 32) ^ argument, "up": up}[kind]
        self._write(group, operands[0], value[lane // 32 * 32 + source], mask)

    def _elect(self, group, suffix, operands, mask) -> None:
        self._whole_warps(mask)
        _, predicate = operands[0].split("|")
        self._write(group, predicate, np.arange(LANES) % 32 == 0, mask)

    @staticmethod
    def _whole_warps(mask: np.ndarray) -> None:
        counts = mask.reshape(-1, 32).sum(axis=1)
        assert ((counts == 0) | (counts == 32)).all(), "a warp is split at a warp-wide instruction"

    # -- asynchronous copies

    def _cp(self, group, suffix, operands, mask) -> None:
        kind = ".".join(suffix)
        if kind == "async.cg.shared.global":
            self._copy_chunks(group, operands, mask)
        elif kind == "async.commit_group":
            assert mask.all(), "groups are counted for a whole warpgroup"
            group.copy_groups.append(group.open_copies)
            group.open_copies = []
        elif kind == "async.wait_group":
            assert mask.all()
            keep = int(operands[0])
            while len(group.copy_groups) > keep:
                for store, index, data in group.copy_groups.pop(0):
                    store[index] = data
        elif kind.startswith("async.bulk.tensor"):
            self._copy_box(group, operands, mask)
        else:
            raise NotImplementedError(kind)

    def _copy_chunks(self, group, operands, mask) -> None:
        shared, index = self._locate("shared", self._address(group, operands[0], 32)[mask], 16)
        source = self._address(group, operands[1])[mask]
        size = self._read(group, operands[3], 32)[mask]
        assert operands[2] == "16" and np.isin(size, (0, 16)).all()
        data = np.zeros((len(source), 16), np.uint8)
        real = size == 16
        if real.any():
            memory, where = self._locate("global", source[real], 16)
            data[real] = memory[where]
        if self.timing.eager_copies:
            shared[index] = data
        else:
            shared[index] = 0xFF
            group.open_copies.append((shared, index, data))

    def _copy_box(self, group, operands, mask) -> None:
        (lane,) = np.flatnonzero(mask)  # one elected thread
        target = int(self._address(group, operands[0], 32)[lane])
        name, coordinates = re.fullmatch(r"\[(%\w+), \{(.*)\}\]", operands[1]).groups()
        descriptor = self.maps[int(self._read(group, name, 64)[lane])]
        at = [int(self._signed(group, c.strip(), 32)[lane]) for c in coordinates.split(",")]
        barrier = self.barriers[int(self._address(group, operands[2], 32)[lane])]
        assert target % 1024 == 0 and len(at) == len(descriptor.extents)
        steps = [np.arange(size) + start for size, start in zip(descriptor.box, at, strict=True)]
        inside = np.ones((), bool)
        offset = np.zeros((), np.int64)
        # slowest dimension first, so that the box comes out in the order it is stored
        for step, extent, stride in list(
            zip(steps, descriptor.extents, descriptor.strides, strict=True)
        )[::-1]:
            inside = inside[..., None] & ((step >= 0) & (step < extent))
            offset = offset[..., None] + step * stride
        source = descriptor.address + 2 * offset.reshape(-1)
        assert inside.all(), "a box outside its tensor"
        memory, where = self._locate("global", source, 2)
        linear = target + 2 * np.arange(source.size)
        row_mask = {128: 0x70, 64: 0x30, 32: 0x10}[descriptor.swizzle_bytes]
        assert descriptor.box[0] * 2 == descriptor.swizzle_bytes
        shared, index = self._locate("shared", linear ^ ((linear >> 3) & row_mask), 2)
        data = memory[where]
        barrier.bytes_due -= data.size
        if self.timing.eager_copies:
            shared[index] = data
        else:
            shared[index] = 0xFF
            barrier.late.append((shared, index, data))
        barrier.settle()

    def _mbarrier(self, group, suffix, operands, mask) -> None:
        kind = suffix[0]
        if kind == "init":
            for address in self._address(group, operands[0], 32)[mask]:
                count = self._read(group, operands[1], 32)[mask][0]
                self._locate("shared", np.array([address]), 8)
                self.barriers[int(address)] = Barrier(int(count))
        elif kind == "arrive":
            addresses = self._address(group, operands[1], 32)
            amounts = self._read(group, operands[2], 32)
            for lane in np.flatnonzero(mask):
                barrier = self.barriers[int(addresses[lane])]
                if suffix[1] == "expect_tx":
                    barrier.bytes_due += int(amounts[lane])
                barrier.arrivals += 1 if suffix[1] == "expect_tx" else int(amounts[lane])
                assert barrier.arrivals <= barrier.expected, "a phase got too many arrivals"
                barrier.settle()
        elif kind == "try_wait":
            addresses = np.unique(self._address(group, operands[1], 32)[mask])
            parities = np.unique(self._read(group, operands[2], 32)[mask])
            assert len(addresses) == len(parities) == 1, "threads wait for different phases"
            assert int(addresses[0]) in self.barriers, "a wait before the barrier is initialised"
            barrier = self.barriers[int(addresses[0])]
            ready = barrier.phase != int(parities[0])
            if not ready:
                group.polling = True
                return
            for shared, index, data in barrier.late:
                shared[index] = data
            barrier.late.clear()
            self._write(group, operands[0], np.full(LANES, True), mask)
        else:
            raise NotImplementedError(kind)

    def _fence(self, group, suffix, operands, mask) -> None:
        assert ".".join(suffix) in ("mbarrier_init.release.cluster", "proxy.async.shared::cta")

    # -- matrix products

    def _wgmma(self, group, suffix, operands, mask) -> None:
        assert mask.all(), "a warpgroup is split at wgmma"
        kind = suffix[0]
        if kind == "fence":
            return
        if kind == "commit_group":
            group.product_groups.append(group.open_products)
            group.open_products = []
        elif kind == "wait_group":
            keep = int(operands[0])
            while len(group.product_groups) > keep:
                for product in group.product_groups.pop(0):
                    product()
        else:
            assert kind == "mma_async"
            self._issue_product(group, suffix, operands)

    def _issue_product(self, group, suffix, operands) -> None:
        columns = int(re.fullmatch(r"m64n(\d+)k16", suffix[3]).group(1))
        element = suffix[5]
        assert suffix[4] == "f32" and suffix[6] == element
        targets = self._vector(operands[0])
        from_registers = operands[1][0] == "{"
        accumulate = operands[3]
        flags = operands[4:]
        assert flags[:2] == ["1", "1"], "scales other than 1"
        if from_registers:
            transposed_b = flags[2]
        else:
            assert flags[2] == "0", "A is K-major"
            transposed_b = flags[3]

        descriptor_a = None if from_registers else int(self._read(group, operands[1], 64)[0])
        descriptor_b = int(self._read(group, operands[2], 64)[0])
        use_old = bool(self._read(group, accumulate, 1)[0])

        def run() -> None:
            if from_registers:
                a = self._a_fragment(group, self._vector(operands[1]), element)
            else:
                a = self._operand(descriptor_a, 64, element, k_major=True)
            b = self._operand(descriptor_b, columns, element, k_major=transposed_b == "0")
            product = a @ b.T
            lane = np.arange(LANES)
            for i, name in enumerate(targets):
                row = lane // 32 * 16 + lane % 32 // 4 + 8 * (i // 2 % 2)
                column = i // 4 * 8 + 2 * (lane % 4) + i % 2
                value = product[row, column]
                if use_old:
                    value = value + self._float(group, name)
                self._write(group, name, value.astype(np.float32), np.ones(LANES, bool))

        if self.timing.eager_products:
            run()
        else:
            group.open_products.append(run)

    def _a_fragment(self, group, names: list[str], element: str) -> np.ndarray:
        a = np.zeros((64, 16), np.float32)
        lane = np.arange(LANES)
        for i, name in enumerate(names):
            packed = self._read(group, name, 32)
            row = lane // 32 * 16 + lane % 32 // 4 + 8 * (i % 2)
            column = 2 * (lane % 4) + 8 * (i // 2)
            a[row, column] = _as_float((packed & np.uint32(0xFFFF)).astype(np.uint16), element)
            a[row, column + 1] = _as_float((packed >> np.uint32(16)).astype(np.uint16), element)
        return a

    def _operand(self, descriptor: int, rows: int, element: str, k_major: bool) -> np.ndarray:
        """[rows, 16] from shared memory by a matrix descriptor."""
        start = (descriptor & 0x3FFF) << 4
        leading = (descriptor >> 16 & 0x3FFF) << 4
        stride = (descriptor >> 32 & 0x3FFF) << 4
        assert descriptor >> 49 & 7 == 0, "a base offset"
        span = {1: 128, 2: 64, 3: 32}[descriptor >> 62]  # bytes of a swizzled row
        r, k = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
        if k_major:
            # groups of 8 rows, `stride` apart; 16 elements lie within one swizzled row
            linear = start + r // 8 * stride + r % 8 * span + 2 * k
        else:
            # bands of span bytes along the rows, `leading` apart; groups of 8 k, `stride` apart
            wide = span // 2
            linear = start + r // wide * leading + r % wide * 2 + k // 8 * stride + k % 8 * span
        address = linear ^ ((linear >> 3) & (span - 16))
        shared, index = self._locate("shared", address.reshape(-1), 2)
        raw = shared[index].view(np.uint16).reshape(rows, 16)
        return _as_float(raw, element)


def _as_float(raw: np.ndarray, element: str) -> np.ndarray:
    if element == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
