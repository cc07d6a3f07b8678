# SPDX-License-Identifier: Apache-2.0
"""Asynchronous work of the PTX machine: copies, mbarriers and products of warpgroups."""

from __future__ import annotations

import re

import numpy as np

from tests.ptx.ptx_arithmetic import WARPGROUP, Arithmetic, as_float
from tests.ptx.ptx_memory import Barrier


class Asynchronous(Arithmetic):
    """Instructions whose work takes effect later: a mixin of the block.

    The block gives `shared`, `timing`, `barriers`, `maps` and how memory is reached.
    """

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
                for index, data in group.copy_groups.pop(0):
                    self.shared[index] = data
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
        shared[index] = data if self.timing.eager_copies else 0xFF
        group.open_copies.append((index, data))

    def _copy_box(self, group, operands, mask) -> None:
        (lane,) = np.flatnonzero(mask)  # one elected thread
        target = int(self._address(group, operands[0], 32)[lane])
        name, coordinates = re.fullmatch(r"\[(%\w+), \{(.*)\}\]", operands[1]).groups()
        descriptor = self.maps[int(self._read(group, name, 64)[lane])]
        at = [int(self._signed(group, c.strip(), 32)[lane]) for c in coordinates.split(",")]
        barrier = self._barrier(int(self._address(group, operands[2], 32)[lane]))
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
            (lane,) = np.flatnonzero(mask)  # one thread
            place = int(self._address(group, operands[0], 32)[lane])
            count = int(self._read(group, operands[1], 32)[lane])
            self._locate("shared", np.array([place]), 8)
            self.barriers[place] = Barrier(count)
        elif kind == "arrive":
            addresses = self._address(group, operands[1], 32)
            amounts = self._read(group, operands[2], 32)
            for lane in np.flatnonzero(mask):
                barrier = self._barrier(int(addresses[lane]))
                if suffix[1] == "expect_tx":
                    barrier.bytes_due += int(amounts[lane])
                barrier.arrive(1 if suffix[1] == "expect_tx" else int(amounts[lane]))
                barrier.settle()
        elif kind == "try_wait":
            addresses = np.unique(self._address(group, operands[1], 32)[mask])
            parities = np.unique(self._read(group, operands[2], 32)[mask])
            assert len(addresses) == len(parities) == 1, "threads wait for different phases"
            barrier = self._barrier(int(addresses[0]))
            ready = barrier.phase != int(parities[0])
            if not ready:
                group.polling = True
                return
            for shared, index, data in barrier.late:
                shared[index] = data
            barrier.late.clear()
            self._write(group, operands[0], np.full(group.lanes, True), mask)
        else:
            raise NotImplementedError(kind)

    def _barrier(self, address: int) -> Barrier:
        assert address in self.barriers, "an mbarrier is used that nobody has set up"
        return self.barriers[address]

    def _fence(self, group, suffix, operands, mask) -> None:
        """Nothing: what the machine does is seen at once."""
        if suffix[0] == "proxy":
            assert ".".join(suffix) == "proxy.async.shared::cta"
            self._whole_warps(mask)
        else:
            assert ".".join(suffix) == "mbarrier_init.release.cluster"

    # -- matrix products

    def _wgmma(self, group, suffix, operands, mask) -> None:
        assert mask.all() and group.lanes == WARPGROUP, "a warpgroup is split at wgmma"
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
                    if product is not None:
                        product()
            left = [*group.product_groups, group.open_products]
            group.pending = {name for products in left for names, _ in products for name in names}
            for copy, source in group.late_moves:
                assert source not in group.pending, "a copy of a sum that is not waited for"
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

        factors = self._vector(operands[1]) if from_registers else []

        def run() -> None:
            if from_registers:
                a = self._a_fragment(group, factors, element)
            else:
                a = self._operand(descriptor_a, 64, element, k_major=True)
            b = self._operand(descriptor_b, columns, element, k_major=transposed_b == "0")
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
        group.open_products.append((targets, None if self.timing.eager_products else run))
        group.pending.update(targets)

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

    def _operand(self, descriptor: int, rows: int, element: str, *, k_major: bool) -> np.ndarray:
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
        _, index = self._locate("shared", address.reshape(-1), 2)
        raw = self.shared[index].view(np.uint16).reshape(rows, 16)
        return as_float(raw, element)
