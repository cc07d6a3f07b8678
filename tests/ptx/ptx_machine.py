# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of one kernel on the CPU, a thread block at a time, with numpy.

It knows the instructions that our kernels use, no others: an unknown one is an error. It is meant
to be hostile where the hardware may be:

    shared memory starts as NaN, and every access to memory is checked against what was allocated;
    what a thread has not written to a register is NaN, -1 or true, and a register that no thread
    has written is an error;
    asynchronous copies and matrix products take effect at once, or only when they are waited for,
    as the `Timing` says, which shows a missing wait or a buffer reused too early;
    a warpgroup runs until it must wait, the first or the last before the others.

What it cannot show: what ptxas makes of the PTX, races within a warpgroup, whose warps step
together, and proxy fences, since memory has one order here.

Threads of a warpgroup step together under a mask (lowest program counter first); registers are
arrays over them. The meaning of each instruction follows the PTX ISA manual.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.ptx.ptx_arithmetic import WARPGROUP, Warpgroup
from tests.ptx.ptx_async import Asynchronous
from tests.ptx.ptx_memory import (
    GLOBAL_BASE,
    PARAM_BASE,
    SHARED_BASE,
    Barrier,
    GlobalMemory,
    TensorMap,
)
from tests.ptx.ptx_program import Program


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


class _Block(Asynchronous):
    def __init__(self, machine: Machine, index, grid, params) -> None:
        self.machine = machine
        self.program = machine.program
        self.memory = machine.memory
        self.timing = machine.timing
        self.index = dict(zip("xyz", index, strict=True))
        self.grid = dict(zip("xyz", grid, strict=True))
        self.shared = np.full(machine.shared_bytes, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        # threads that a barrier of some of them is for
        self.expected: dict[int, int] = {}
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
        threads = self.program.threads
        assert threads % 32 == 0
        # Warps that are no whole warpgroup come last.
        self.groups = [
            Warpgroup(first, min(WARPGROUP, threads - first))
            for first in range(0, threads, WARPGROUP)
        ]

    # -- scheduling

    def run(self) -> None:
        order = self.groups[::-1] if self.timing.reverse_warpgroups else self.groups
        with np.errstate(all="ignore"):
            while not all(g.done.all() for g in self.groups):
                progress = False
                for group in order:
                    progress |= self._advance(group)
                progress |= self._pass_barriers()
                if not progress:
                    raise RuntimeError(f"deadlock in block {self.index}")
        for group in self.groups:
            assert not group.open_products and not group.product_groups, "products left unwaited"

    def _pass_barriers(self) -> bool:
        """Lets threads go on from barriers at which all have arrived."""
        passed = False
        for number in {int(n) for group in self.groups for n in group.at_barrier if n >= 0}:
            waiting = [group.at_barrier == number for group in self.groups]
            arrived = sum(int(w.sum()) for w in waiting)
            done = sum(int(group.done.sum()) for group in self.groups)
            expected = self.expected.get(number, self.program.threads - done)
            assert arrived <= expected, f"more threads at barrier {number} than it is for"
            if arrived < expected:
                continue
            for there in waiting:
                self._whole_warps(there)
            for group, there in zip(self.groups, waiting, strict=True):
                group.pc[there] += 1
                group.at_barrier[there] = -1
            passed = True
        return passed

    def _advance(self, group: Warpgroup) -> bool:
        """Steps a warpgroup until all its threads wait or are done."""
        moved = False
        while True:
            runnable = ~(group.done | (group.at_barrier >= 0))
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
            target = self.program.labels[operands[0]]
            group.pc[mask] += 1
            group.pc[taken] = target
            return
        if name == "ret":
            assert guard is None
            group.done[mask] = True
            return
        if opcode == "bar.sync":
            assert guard is None
            number = int(operands[0])
            if len(operands) > 1:
                assert self.expected.setdefault(number, int(operands[1])) == int(operands[1])
            group.at_barrier[mask] = number
            return
        handler = getattr(self, "_" + name, None)
        if handler is None:
            raise NotImplementedError(f"{opcode} {operands}")
        if taken.any():
            handler(group, suffix, operands, taken)
        elif name == "ld":
            for register in self._vector(operands[0]):
                # Anything, but something: a warp may hand on what none of its threads loaded.
                bits = int(suffix[-1][1:])
                unknown = np.full(group.lanes, 2**bits - 1, f"u{bits // 8}")
                group.registers.setdefault(register, unknown)
        if not group.polling:
            group.pc[mask] += 1

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
        kinds = {16: np.uint16, 32: np.uint32, 64: np.uint64}
        store, index = self._locate(space, address[mask], size)
        loaded = store[index].view(kinds[bits])
        for i, name in enumerate(lanes):
            full = np.zeros(group.lanes, loaded.dtype)
            full[mask] = loaded[:, i]
            self._write(group, name, full, mask)

    def _st(self, group, suffix, operands, mask) -> None:
        space, bits = suffix[0], int(suffix[-1][1:])
        lanes = self._vector(operands[1])
        values = np.stack([self._read(group, name, bits) for name in lanes], axis=1)[mask]
        address = self._address(group, operands[0], 64 if space == "global" else 32)
        data = np.ascontiguousarray(values).view(np.uint8)
        store, index = self._locate(space, address[mask], data.shape[1])
        store[index] = data

    # -- within a warp

    def _shfl(self, group, suffix, operands, mask) -> None:
        self._whole_warps(mask)
        kind = suffix[1]
        value = self._read(group, operands[1], 32)
        lane = np.arange(group.lanes)
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
        self._write(group, predicate, np.arange(group.lanes) % 32 == 0, mask)

    def _bar(self, group, suffix, operands, mask) -> None:
        assert suffix == ["warp", "sync"] and operands == ["-1"], (suffix, operands)
        self._whole_warps(mask)

    @staticmethod
    def _whole_warps(mask: np.ndarray) -> None:
        counts = mask.reshape(-1, 32).sum(axis=1)
        assert ((counts == 0) | (counts == 32)).all(), "a warp is split at a warp-wide instruction"
