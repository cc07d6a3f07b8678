# SPDX-License-Identifier: Apache-2.0
"""Registers and arithmetic of the PTX machine; registers are arrays over a warpgroup."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.ptx.ptx_memory import SHARED_BASE

WARPGROUP = 128


@dataclass
class Warpgroup:
    """Threads stepped together, 128 or fewer: their registers, program counters, and what they
    wait for."""

    first_thread: int
    lanes: int
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    copy_groups: list = field(default_factory=list)
    open_copies: list = field(default_factory=list)
    # (registers of the sums, what computes them if that is due at the wait) of each product
    product_groups: list = field(default_factory=list)
    open_products: list = field(default_factory=list)
    # Sums whose product is still in flight, and copies of these, which are repeated after the wait.
    pending: set[str] = field(default_factory=set)
    late_moves: list = field(default_factory=list)
    polling: bool = False
    executed: int = 0

    def __post_init__(self) -> None:
        self.pc = np.zeros(self.lanes, np.int64)
        self.done = np.zeros(self.lanes, bool)
        # number of the barrier at which a thread waits, or -1
        self.at_barrier = np.full(self.lanes, -1)


class Arithmetic:
    """Operands, and instructions that touch registers alone: a mixin of the block.

    The block gives `index`, `grid` and `param_values`.
    """

    def _read(self, group: Warpgroup, operand: str, bits: int) -> np.ndarray:
        """Operand as an array of unsigned integers of 16 to 64 bits (bool for bits 1)."""
        dtype = {1: bool, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
        if operand in group.registers:
            return group.registers[operand].astype(dtype)
        if operand[0] == "{":
            names = self._vector(operand)
            parts = [self._read(group, name, bits // len(names)).astype(dtype) for name in names]
            value = parts[0]
            for i, part in enumerate(parts[1:], 1):
                value = value | (part << dtype(i * bits // len(names)))
            return value
        value: int
        if operand.startswith("%"):
            special, _, axis = operand[1:].partition(".")
            if special == "tid":
                lanes = np.arange(group.lanes, dtype=dtype) + dtype(group.first_thread)
                return lanes if axis == "x" else np.zeros(group.lanes, dtype)
            assert axis, f"{operand} is read before anything was written to it"
            value = {"ctaid": self.index, "nctaid": self.grid}[special][axis]
        elif operand[:2] == "0f":
            value = int(operand[2:], 16)
        elif operand == "__dynamic_shmem__0":
            value = SHARED_BASE
        elif operand in self.param_values:
            value = self.param_values[operand]
        else:
            value = int(operand.removesuffix("U"), 0)
        return np.full(group.lanes, value & (2**bits - 1), dtype)

    def _signed(self, group, operand: str, bits: int) -> np.ndarray:
        return self._read(group, operand, bits).view(
            {16: np.int16, 32: np.int32, 64: np.int64}[bits]
        )

    def _float(self, group, operand: str) -> np.ndarray:
        return self._read(group, operand, 32).view(np.float32)

    def _write(self, group: Warpgroup, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if name == "_":
            return
        if value.dtype != bool:
            unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
            value = value.view(unsigned[value.dtype.itemsize])
        if mask.all():
            group.registers[name] = value.copy()
            return
        old = group.registers.get(name)
        if old is None or old.dtype != value.dtype:
            # Other threads have not written it: NaN, -1, true.
            old = ~np.zeros_like(value) if old is None else old.astype(value.dtype)
        else:
            old = old.copy()
        old[mask] = value[mask]
        group.registers[name] = old

    def _address(self, group, operand: str, bits: int = 64) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return self._read(group, base.strip(), bits).astype(np.int64) + int(offset or 0)

    @staticmethod
    def _vector(operand: str) -> list[str]:
        return [o.strip() for o in operand.strip("{}").split(",")]

    # -- arithmetic

    def _mov(self, group, suffix, operands, mask) -> None:
        bits = 1 if suffix[-1] == "pred" else int(suffix[-1][1:])
        if operands[0][0] == "{":
            value = self._read(group, operands[1], bits)
            names = self._vector(operands[0])
            part = bits // len(names)
            element = {16: np.uint16, 32: np.uint32}[part]
            for i, name in enumerate(names):
                self._write(
                    group, name, (value >> value.dtype.type(i * part)).astype(element), mask
                )
            return
        if operands[1] in group.pending:
            # LLVM names sums anew just before the wait for them. The assembler gives both names one
            # register, so the copy holds what the wait brings.
            group.late_moves.append((operands[0], operands[1]))
            group.pending.add(operands[0])
        self._write(group, operands[0], self._read(group, operands[1], bits), mask)

    def _cvta(self, group, suffix, operands, mask) -> None:
        self._write(group, operands[0], self._read(group, operands[1], 64), mask)

    def _binary(self, group, suffix, operands, mask, integer, floating=None) -> None:
        kind = suffix[-1]
        if kind == "pred":
            a, b = (self._read(group, o, 1) for o in operands[1:3])
            self._write(group, operands[0], integer(a, b), mask)
        elif kind == "f32":
            a, b = (self._float(group, o) for o in operands[1:3])
            result = (floating or integer)(a, b).astype(a.dtype)
            self._write(group, operands[0], self._flushed(result, suffix), mask)
        else:
            bits = int(kind[1:])
            read = self._signed if kind[0] == "s" else self._read
            a, b = (read(group, o, bits) for o in operands[1:3])
            self._write(group, operands[0], integer(a, b).astype(a.dtype), mask)

    @staticmethod
    def _flushed(value: np.ndarray, suffix: list[str]) -> np.ndarray:
        """Without subnormal numbers, if the instruction says so."""
        if "ftz" not in suffix:
            return value
        return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.copysign(0, value), value)

    def _add(self, *args) -> None:
        self._binary(*args, np.add)

    def _sub(self, *args) -> None:
        self._binary(*args, np.subtract)

    def _and(self, *args) -> None:
        self._binary(*args, lambda a, b: a & b)

    def _or(self, *args) -> None:
        self._binary(*args, lambda a, b: a | b)

    def _xor(self, *args) -> None:
        self._binary(*args, lambda a, b: a ^ b)

    def _min(self, *args) -> None:
        self._binary(*args, np.minimum, np.fmin)

    def _max(self, *args) -> None:
        self._binary(*args, np.maximum, np.fmax)

    def _div(self, group, suffix, operands, mask) -> None:
        if suffix[-1][0] == "f":
            self._binary(group, suffix, operands, mask, None, np.divide)
            return
        bits = int(suffix[-1][1:])
        read = self._signed if suffix[-1][0] == "s" else self._read
        a, b = (read(group, o, bits) for o in operands[1:3])
        assert (b[mask] != 0).all(), "division by zero"
        b = np.where(b == 0, b.dtype.type(1), b)
        quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
        sign = np.where((a < 0) != (b < 0), -1, 1)
        self._write(group, operands[0], (quotient * sign).astype(a.dtype), mask)

    def _mul(self, group, suffix, operands, mask) -> None:
        if suffix[-1][0] == "f":
            self._binary(group, suffix, operands, mask, np.multiply)
            return
        mode, kind = suffix[-2], suffix[-1]
        bits = int(kind[1:])
        read = self._signed if kind[0] == "s" else self._read
        a, b = (read(group, o, bits) for o in operands[1:3])
        wide = {16: np.int32, 32: np.int64}.get(bits, a.dtype)
        if kind[0] == "u":
            wide = {16: np.uint32, 32: np.uint64}.get(bits, a.dtype)
        product = a.astype(wide) * b.astype(wide)
        if mode == "hi":
            product = (product >> wide(bits)).astype(a.dtype)
        elif mode == "lo":
            product = product.astype(a.dtype)
        self._write(group, operands[0], product, mask)

    def _mad(self, group, suffix, operands, mask) -> None:
        assert suffix[-2] in ("lo", "wide")
        bits = int(suffix[-1][1:])
        read = self._signed if suffix[-1][0] == "s" else self._read
        a, b = (read(group, o, bits) for o in operands[1:3])
        if suffix[-2] == "wide":
            wide = np.int64 if suffix[-1][0] == "s" else np.uint64
            a, b = a.astype(wide), b.astype(wide)
            bits *= 2
        self._write(group, operands[0], a * b + read(group, operands[3], bits), mask)

    def _fma(self, group, suffix, operands, mask) -> None:
        assert suffix[-1] == "f32"
        values = (self._flushed(self._float(group, o), suffix) for o in operands[1:4])
        a, b, c = (value.astype(np.float64) for value in values)
        result = self._flushed((a * b + c).astype(np.float32), suffix)
        self._write(group, operands[0], result, mask)

    def _neg(self, group, suffix, operands, mask) -> None:
        if suffix[-1] == "f32":
            self._write(group, operands[0], -self._float(group, operands[1]), mask)
        else:
            self._write(
                group, operands[0], -self._signed(group, operands[1], int(suffix[-1][1:])), mask
            )

    def _not(self, group, suffix, operands, mask) -> None:
        bits = 1 if suffix[-1] == "pred" else int(suffix[-1][1:])
        self._write(group, operands[0], ~self._read(group, operands[1], bits), mask)

    def _shift(self, group, suffix, operands, mask, left: bool) -> None:
        bits = int(suffix[-1][1:])
        read = self._signed if suffix[-1][0] == "s" else self._read
        value = read(group, operands[1], bits)
        by = self._read(group, operands[2], 32).astype(np.int64)
        clamped = np.minimum(by, bits - 1).astype(value.dtype)
        result = (value << clamped) if left else (value >> clamped)
        if suffix[-1][0] != "s":
            # shifts past the width clear an unsigned value
            result = np.where(by >= bits, value.dtype.type(0), result)
        self._write(group, operands[0], result, mask)

    def _shl(self, *args) -> None:
        self._shift(*args, left=True)

    def _shr(self, *args) -> None:
        self._shift(*args, left=False)

    def _setp(self, group, suffix, operands, mask) -> None:
        test, kind = suffix[0], suffix[-1]
        if kind == "f32":
            a, b = (self._float(group, o) for o in operands[1:3])
        else:
            read = self._signed if kind[0] == "s" else self._read
            a, b = (read(group, o, int(kind[1:])) for o in operands[1:3])
        self._write(group, operands[0], _compared(test, a, b), mask)

    def _selp(self, group, suffix, operands, mask) -> None:
        bits = int(suffix[-1][1:])
        a, b = (self._read(group, o, bits) for o in operands[1:3])
        self._write(group, operands[0], np.where(self._read(group, operands[3], 1), a, b), mask)

    def _cvt(self, group, suffix, operands, mask) -> None:
        to, source = suffix[-2], suffix[-1]
        if to in ("bf16x2", "f16x2"):
            high, low = (self._half(self._float(group, o), to[:-2]) for o in operands[1:3])
            value = low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
        elif source in ("bf16", "f16"):
            raw = self._read(group, operands[1], 16)
            assert to == "f32", suffix
            value = as_float(raw, source)
        elif to in ("bf16", "f16"):
            value = self._half(self._float(group, operands[1]), to)
        elif to == "f32":
            assert suffix[0] == "rn" and source[0] in "su", suffix
            read = self._signed if source[0] == "s" else self._read
            value = read(group, operands[1], int(source[1:])).astype(np.float32)
        else:
            assert to[0] in "su" and source[0] in "su", suffix
            bits = int(source[1:])
            read = self._signed if source[0] == "s" else self._read
            kinds = {16: np.int16, 32: np.int32, 64: np.int64}
            if to[0] == "u":
                kinds = {16: np.uint16, 32: np.uint32, 64: np.uint64}
            value = read(group, operands[1], bits).astype(kinds[int(to[1:])])
        self._write(group, operands[0], value, mask)

    @staticmethod
    def _half(value: np.ndarray, kind: str) -> np.ndarray:
        """float32 rounded to nearest even, as the bits of a 16-bit format."""
        if kind == "f16":
            return value.astype(np.float16).view(np.uint16)
        raw = value.view(np.uint32).astype(np.uint64)
        rounded = (raw + np.uint64(0x7FFF) + ((raw >> np.uint64(16)) & np.uint64(1))) >> np.uint64(
            16
        )
        return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint16)

    def _ex2(self, group, suffix, operands, mask) -> None:
        value = np.exp2(self._flushed(self._float(group, operands[1]), suffix))
        self._write(group, operands[0], self._flushed(value, suffix), mask)

    def _lg2(self, group, suffix, operands, mask) -> None:
        value = self._flushed(self._float(group, operands[1]), suffix)
        self._write(group, operands[0], np.log2(value), mask)

    def _popc(self, group, suffix, operands, mask) -> None:
        value = self._read(group, operands[1], int(suffix[-1][1:]))
        count = np.bitwise_count(value).astype(np.uint32)
        self._write(group, operands[0], count, mask)

    def _rcp(self, group, suffix, operands, mask) -> None:
        one = np.float32(1)
        self._write(group, operands[0], one / self._float(group, operands[1]), mask)


def as_float(raw: np.ndarray, element: str) -> np.ndarray:
    """Bits of a 16-bit format, widened to float32."""
    if element == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _compared(test: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What setp finds; among floats, one that is not a number makes ordered tests false and
    unordered ones true."""
    unordered = test in ("ltu", "leu", "gtu", "geu", "equ", "neu")
    base = test[:-1] if unordered else test
    base = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(base, base)
    result = {
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "eq": np.equal, "ne": np.not_equal,
    }[base](a, b)  # fmt: skip
    if a.dtype.kind == "f":
        nan = np.isnan(a) | np.isnan(b)
        result = (result | nan) if unordered else (result & ~nan)
    return result
