# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of one kernel on the CPU, a thread block at a time, with numpy.

It knows the instructions that our kernels use, no others: an unknown one is an error. It is meant
to be hostile where the hardware may be:

    shared memory starts as NaN, and every access to memory is checked against what was allocated;
    what a thread has not written to a register is NaN, -1 or true, and a register that no thread
    has written is an error;
    what a warp wrote to shared memory may not be read by another before a barrier, nor may it
    overwrite what another has read since the last one;
    asynchronous copies and matrix products take effect at once, or only when they are waited for,
    as the `Timing` says, which shows a missing wait or a buffer reused too early;
    warpgroups run one after the other between barriers, in either order.

What it cannot show: missing fences between memory proxies, and what ptxas makes of the PTX.

Threads of a warpgroup step together under a mask (lowest program counter first); registers are
arrays over them. The meaning of each instruction follows the PTX ISA manual.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tests.kernels.ptx_arithmetic import WARPGROUP, Arithmetic, Warpgroup, as_float
from tests.kernels.ptx_memory import (
    GLOBAL_BASE,
    PARAM_BASE,
    SHARED_BASE,
    Barrier,
    GlobalMemory,
    SharedMemory,
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
        self.shared = SharedMemory(machine.shared_bytes)
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
        self.lanes = min(WARPGROUP, self.program.threads)
        count = self.program.threads // self.lanes
        assert count * self.lanes == self.program.threads and self.lanes % 32 == 0
        self.groups = [Warpgroup(i * self.lanes, self.lanes) for i in range(count)]

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
                    self.shared.barrier()
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
        if name == "ret":
            assert guard is None
            group.done[mask] = True
            return
        if opcode == "bar.sync":
            assert guard is None and operands == ["0"], "a barrier of some of the threads"
            group.at_barrier[mask] = True
            return
        handler = getattr(self, "_" + name, None)
        if handler is None:
            raise NotImplementedError(f"{opcode} {operands}")
        if taken.any():
            handler(group, suffix, operands, taken)
        elif name == "ld":
            for register in self._vector(operands[0]):
                # Anything, but something: a warp may hand on what none of its threads loaded.
                bits = max(16, int(suffix[-1][1:]))
                unknown = np.full(self.lanes, 2**bits - 1, f"u{bits // 8}")
                group.registers.setdefault(register, unknown)
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
        assert (index >= 0).all() and (index < self.shared.bytes.size).all(), (
            "shared memory overrun"
        )
        return self.shared.bytes, index

    def _load(self, group, space: str, address: np.ndarray, size: int, mask) -> np.ndarray:
        """[n, size] bytes of the threads in `mask`; `address` is theirs alone."""
        store, index = self._locate(space, address, size)
        if space == "shared":
            self.shared.read(index, self._warps(group, mask))
        return store[index]

    def _store(self, group, space: str, address: np.ndarray, data: np.ndarray, mask) -> None:
        store, index = self._locate(space, address, data.shape[1])
        if space == "shared":
            self.shared.write(index, self._warps(group, mask), data)
        else:
            store[index] = data

    def _warps(self, group, mask: np.ndarray) -> np.ndarray:
        return (group.first_thread + np.flatnonzero(mask)) // 32

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
        kinds = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
        loaded = self._load(group, space, address[mask], size, mask).view(kinds[bits])
        for i, name in enumerate(lanes):
            # There are no registers of a byte.
            full = np.zeros(self.lanes, np.uint32 if bits == 8 else loaded.dtype)
            full[mask] = loaded[:, i]
            self._write(group, name, full, mask)

    def _st(self, group, suffix, operands, mask) -> None:
        space, bits = suffix[0], int(suffix[-1][1:])
        lanes = self._vector(operands[1])
        values = np.stack([self._read(group, name, bits) for name in lanes], axis=1)[mask]
        address = self._address(group, operands[0], 64 if space == "global" else 32)
        self._store(group, space, address[mask], np.ascontiguousarray(values).view(np.uint8), mask)

    # -- within a warp

    def _shfl(self, group, suffix, operands, mask) -> None:
        self._whole_warps(mask)
        kind = suffix[1]
        value = self._read(group, operands[1], 32)
        lane = np.arange(self.lanes)
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
        self._write(group, predicate, np.arange(self.lanes) % 32 == 0, mask)

    def _redux(self, group, suffix, operands, mask) -> None:
        """One result for the threads of a warp."""
        self._whole_warps(mask)
        assert self._read(group, operands[2], 32)[mask].min() == 0xFFFFFFFF
        kind, element = suffix[1:]
        read = self._signed if element[0] == "s" else self._read
        value = read(group, operands[1], 32).reshape(-1, 32)
        reduce = {"add": np.sum, "min": np.min, "max": np.max}[kind]
        result = reduce(value, axis=1).astype(value.dtype).repeat(32)
        self._write(group, operands[0], result, mask)

    def _bar(self, group, suffix, operands, mask) -> None:
        assert suffix == ["warp", "sync"] and operands == ["-1"], (suffix, operands)
        self._whole_warps(mask)

    @staticmethod
    def _whole_warps(mask: np.ndarray) -> None:
        counts = mask.reshape(-1, 32).sum(axis=1)
        assert ((counts == 0) | (counts == 32)).all(), "a warp is split at a warp-wide instruction"

    # -- matrices of a warp

    def _fragments(self, group, suffix, operand: str, mask) -> tuple[np.ndarray, int]:
        """Addresses of the rows of 8 x 8 matrices [warps, matrices, 8], and the bytes' matrices."""
        self._whole_warps(mask)
        assert suffix[:3] == ["sync", "aligned", "m8n8"] and suffix[-1] == "b16", suffix
        count = int(suffix[3][1:])
        address = self._address(group, operand, 32)[mask].reshape(-1, 32)
        return address[:, : 8 * count].reshape(-1, count, 8), count

    def _ldmatrix(self, group, suffix, operands, mask) -> None:
        rows, count = self._fragments(group, suffix, operands[1], mask)
        lanes = np.repeat(mask.reshape(-1, 32)[:, :1], 8 * count, axis=1)
        padded = np.zeros((self.lanes // 32, 32), bool)
        padded[:, : 8 * count] = lanes
        data = self._load(group, "shared", rows.reshape(-1), 16, padded.reshape(-1))
        matrices = data.view(np.uint16).reshape(-1, count, 8, 8)
        if "trans" in suffix:
            matrices = matrices.swapaxes(2, 3)
        # thread 4 r + c of a warp takes elements 2 c and 2 c + 1 of row r
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, 32)
        for i, name in enumerate(self._vector(operands[0])):
            full = np.zeros(self.lanes, np.uint32)
            full[mask] = pairs[:, i].reshape(-1)
            self._write(group, name, full, mask)

    def _stmatrix(self, group, suffix, operands, mask) -> None:
        rows, count = self._fragments(group, suffix, operands[0], mask)
        values = [self._read(group, name, 32)[mask] for name in self._vector(operands[1])]
        pairs = np.stack(values, axis=1).reshape(-1, 32, count).swapaxes(1, 2)
        matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, count, 8, 8)
        if "trans" in suffix:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        lanes = np.repeat(mask.reshape(-1, 32)[:, :1], 8 * count, axis=1)
        padded = np.zeros((self.lanes // 32, 32), bool)
        padded[:, : 8 * count] = lanes
        data = matrices.view(np.uint8).reshape(-1, 16)
        self._store(group, "shared", rows.reshape(-1), data, padded.reshape(-1))

    def _mma(self, group, suffix, operands, mask) -> None:
        """m16n8k16 of every warp, with sums in float32."""
        self._whole_warps(mask)
        assert suffix[:5] == ["sync", "aligned", "m16n8k16", "row", "col"], suffix
        assert suffix[5] == suffix[8] == "f32" and suffix[6] == suffix[7], suffix
        element, warps = suffix[6], self.lanes // 32
        lane = np.arange(self.lanes)
        warp, row, pair = lane // 32, lane % 32 // 4, 2 * (lane % 4)
        a, b = np.zeros((warps, 16, 16), np.float32), np.zeros((warps, 8, 16), np.float32)
        for factor, operand, places in (
            (a, operands[1], [(8 * (i % 2), 8 * (i // 2)) for i in range(4)]),
            (b, operands[2], [(0, 8 * i) for i in range(2)]),
        ):
            for name, (down, right) in zip(self._vector(operand), places, strict=True):
                packed = self._read(group, name, 32)
                for half in range(2):
                    raw = (packed >> np.uint32(16 * half)).astype(np.uint16)
                    factor[warp, row + down, pair + right + half] = as_float(raw, element)
        product = a @ b.swapaxes(1, 2)
        old = [self._float(group, name) for name in self._vector(operands[3])]
        for i, name in enumerate(self._vector(operands[0])):
            value = product[warp, row + 8 * (i // 2), pair + i % 2]
            self._write(group, name, (value + old[i]).astype(np.float32), mask)

    # -- asynchronous copies

    def _cp(self, group, suffix, operands, mask) -> None:
        kind = ".".join(suffix)
        if kind in ("async.cg.shared.global", "async.ca.shared.global"):
            self._copy_chunks(group, operands, mask)
        elif kind == "async.commit_group":
            assert mask.all(), "groups are counted for a whole warpgroup"
            group.copy_groups.append(group.open_copies)
            group.open_copies = []
        elif kind == "async.wait_group":
            assert mask.all()
            keep = int(operands[0])
            while len(group.copy_groups) > keep:
                for index, warps, data in group.copy_groups.pop(0):
                    self.shared.write(index, warps, data)
        elif kind.startswith("async.bulk.tensor"):
            self._copy_box(group, operands, mask)
        else:
            raise NotImplementedError(kind)

    def _copy_chunks(self, group, operands, mask) -> None:
        bytes_copied = int(operands[2], 0)
        target = self._address(group, operands[0], 32)[mask]
        shared, index = self._locate("shared", target, bytes_copied)
        source = self._address(group, operands[1])[mask]
        real = np.ones(len(source), bool)
        if len(operands) > 3:
            # What lies past the source's bytes is zero; ours are all or none.
            size = self._read(group, operands[3], 32)[mask]
            assert np.isin(size, (0, bytes_copied)).all()
            real = size > 0
        data = np.zeros((len(source), bytes_copied), np.uint8)
        if real.any():
            memory, where = self._locate("global", source[real], bytes_copied)
            data[real] = memory[where]
        warps = self._warps(group, mask)
        self.shared.write(index, warps, None)
        shared[index] = data if self.timing.eager_copies else 0xFF
        group.open_copies.append((index, warps, data))

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
            self._write(group, operands[0], np.full(self.lanes, True), mask)
        else:
            raise NotImplementedError(kind)

    def _fence(self, group, suffix, operands, mask) -> None:
        assert ".".join(suffix) in ("mbarrier_init.release.cluster", "proxy.async.shared::cta")

    # -- matrix products

    def _wgmma(self, group, suffix, operands, mask) -> None:
        assert mask.all() and self.lanes == WARPGROUP, "a warpgroup is split at wgmma"
        kind = suffix[0]
        if kind == "fence":
            return
        if kind == "commit_group":
            group.product_groups.append(group.open_products)
            group.open_products = []
        elif kind == "wait_group":
            keep = int(operands[0])
            while len(group.product_groups) > keep:
                for _, product in group.product_groups.pop(0):
                    product()
            for copy, source in group.late_moves:
                assert not self._pending(group, source), "a copy of a sum that is not waited for"
                self._write(group, copy, self._read(group, source, 32), mask)
            group.late_moves.clear()
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
                a = self._operand(group, descriptor_a, 64, element, k_major=True)
            b = self._operand(group, descriptor_b, columns, element, k_major=transposed_b == "0")
            product = a @ b.T
            lane = np.arange(WARPGROUP)
            for i, name in enumerate(targets):
                row = lane // 32 * 16 + lane % 32 // 4 + 8 * (i // 2 % 2)
                column = i // 4 * 8 + 2 * (lane % 4) + i % 2
                value = product[row, column]
                if use_old:
                    value = value + self._float(group, name)
                self._write(group, name, value.astype(np.float32), np.ones(WARPGROUP, bool))

        if self.timing.eager_products:
            run()
        else:
            group.open_products.append((frozenset(targets), run))

    @staticmethod
    def _pending(group, name: str) -> bool:
        """Whether a product that nobody has waited for will write this register."""
        return any(
            name in targets
            for products in (group.open_products, *group.product_groups)
            for targets, _ in products
        )

    def _a_fragment(self, group, names: list[str], element: str) -> np.ndarray:
        a = np.zeros((64, 16), np.float32)
        lane = np.arange(WARPGROUP)
        for i, name in enumerate(names):
            packed = self._read(group, name, 32)
            row = lane // 32 * 16 + lane % 32 // 4 + 8 * (i % 2)
            column = 2 * (lane % 4) + 8 * (i // 2)
            a[row, column] = as_float((packed & np.uint32(0xFFFF)).astype(np.uint16), element)
            a[row, column + 1] = as_float((packed >> np.uint32(16)).astype(np.uint16), element)
        return a

    def _operand(
        self, group, descriptor: int, rows: int, element: str, k_major: bool
    ) -> np.ndarray:
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
        for warp in range(WARPGROUP // 32):
            self.shared.read(index, np.full(len(index), group.first_thread // 32 + warp))
        raw = shared[index].view(np.uint16).reshape(rows, 16)
        return as_float(raw, element)
