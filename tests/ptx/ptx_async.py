# SPDX-License-Identifier: Apache-2.0
"""Asynchronous work of the PTX machine: copies, mbarriers and products of warpgroups."""

from __future__ import annotations

import re

import numpy as np

from tests.ptx.ptx_arithmetic import WARPGROUP, Arithmetic, as_float
from tests.ptx.ptx_memory import Barrier
from tests.ptx.ptx_registers import FACTOR


class Asynchronous(Arithmetic):
    """Instructions whose work takes effect later: a mixin of the block.

    The block gives `shared`, `order`, `timing`, `barriers`, `maps` and how memory is reached.
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
            group.copies_closed += 1
        elif kind == "async.wait_group":
            assert mask.all()
            keep = int(operands[0])
            while len(group.copy_groups) > keep:
                for index, data in group.copy_groups.pop(0):
                    self.shared.bytes[index] = data
                group.copies_waited += 1
            for warp in group.warps:
                self.order.waited(
                    warp, self.order.copies(warp), group.copies_waited, together=False
                )
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
        self.shared.write_by_copies(index, warps, group.copies_closed + 1)
        shared[index] = data if self.timing.eager_copies else 0xFF
        group.open_copies.append((index, data))

    def _copy_box(self, group, operands, mask) -> None:
        (lane,) = np.flatnonzero(mask)  # one elected thread
        target = int(self._address(group, operands[0], 32)[lane])
        name, coordinates = re.fullmatch(r"\[(%\w+), \{(.*)\}\]", operands[1]).groups()
        descriptor = self.maps[int(self._read(group, name, 64)[lane])]
        at = [int(self._signed(group, c.strip(), 32)[lane]) for c in coordinates.split(",")]
        counted_by = int(self._address(group, operands[2], 32)[lane])
        barrier, warp = self._barrier(counted_by), (group.first_thread + int(lane)) // 32
        barrier.check_fence(warp)
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
        self.shared.write_by_box(index, warp, counted_by)
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
            self._use_barriers(group, np.array([place]), mask, set_up=True)
            self.barriers[place] = Barrier(
                count, self.order, self.order.boxes(place), maker=group.first_thread + int(lane)
            )
        elif kind == "arrive":
            addresses = self._address(group, operands[1], 32)
            amounts = self._read(group, operands[2], 32)
            self._use_barriers(group, addresses[mask], mask)
            alone = ~mask.reshape(-1, 32).all(axis=1)
            for lane in np.flatnonzero(mask):
                barrier = self._barrier(int(addresses[lane]))
                if suffix[1] == "expect_tx":
                    barrier.bytes_due += int(amounts[lane])
                count = 1 if suffix[1] == "expect_tx" else int(amounts[lane])
                barrier.arrive(
                    (group.first_thread + int(lane)) // 32, count, alone=bool(alone[lane // 32])
                )
                barrier.settle()
        elif kind == "try_wait":
            addresses = np.unique(self._address(group, operands[1], 32)[mask])
            parities = np.unique(self._read(group, operands[2], 32)[mask])
            assert len(addresses) == len(parities) == 1, "threads wait for different phases"
            self._use_barriers(group, np.repeat(addresses, mask.sum()), mask)
            barrier = self._barrier(int(addresses[0]))
            ready = barrier.phase != int(parities[0])
            if not ready:
                group.polling = True
                return
            for shared, index, data in barrier.late:
                shared[index] = data
            barrier.late.clear()
            if barrier.told is not None:
                whole = mask.reshape(-1, 32).all(axis=1)
                for warp in np.unique(self._warps(group, mask)):
                    every_lane = bool(whole[warp - group.first_thread // 32])
                    self.order.learn([warp], barrier.told, every_lane=every_lane)
            self._write(group, operands[0], np.full(group.lanes, True), mask)
        else:
            raise NotImplementedError(kind)

    def _barrier(self, address: int) -> Barrier:
        assert address in self.barriers, "an mbarrier is used that nobody has set up"
        return self.barriers[address]

    def _use_barriers(self, group, addresses: np.ndarray, mask, *, set_up: bool = False) -> None:
        """Where mbarriers lie, those who use them must know that they were set up."""
        _, index = self._locate("shared", addresses, 8)
        if set_up:
            zeros = np.zeros(index.shape, np.uint8)
            self.shared.write(index, self._warps(group, mask)[: len(index)], zeros)
        else:
            self.shared.read(index, self._warps(group, mask))

    def _fence(self, group, suffix, operands, mask) -> None:
        if suffix[0] == "proxy":
            assert ".".join(suffix) == "proxy.async.shared::cta"
            self._whole_warps(mask)
            self.order.fence(np.unique(self._warps(group, mask)))
        else:
            assert ".".join(suffix) == "mbarrier_init.release.cluster"
        # Either shows the copy engine the mbarriers that these threads have set up.
        threads = set((group.first_thread + np.flatnonzero(mask)).tolist())
        for barrier in self.barriers.values():
            if barrier.maker in threads:
                barrier.fence()

    # -- matrix products

    def _wgmma(self, group, suffix, operands, mask) -> None:
        assert mask.all() and group.lanes == WARPGROUP, "a warpgroup is split at wgmma"
        kind = suffix[0]
        if kind == "fence":
            group.product_registers.fence()
        elif kind == "commit_group":
            group.product_groups.append(group.open_products)
            group.open_products = []
            group.products_closed += 1
        elif kind == "wait_group":
            keep = int(operands[0])
            while len(group.product_groups) > keep:
                for product in group.product_groups.pop(0):
                    product()
                group.products_waited += 1
            for warp in group.warps:
                self.order.waited(
                    warp, self.order.products(warp), group.products_waited, together=True
                )
            for copy, source in group.late_moves:
                waited = group.products_waited
                assert not group.product_registers.pending(source, waited), (
                    "a copy of a sum that is not waited for"
                )
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
        for names, kind in ((targets, suffix[3]), (factors, FACTOR)):
            for name in names:
                group.product_registers.multiply(
                    name, kind, group.products_closed + 1, group.products_waited
                )

        # Read from now until the group is waited for, whenever the product takes effect here.
        for index in (
            None if from_registers else self._places(descriptor_a, 64, k_major=True),
            self._places(descriptor_b, columns, k_major=transposed_b == "0"),
        ):
            if index is not None:
                for warp in group.warps:
                    self.shared.read_by_product(index, warp, group.products_closed + 1)

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
        # What is not waited for shows in any timing.
        group.open_products.append((lambda: None) if self.timing.eager_products else run)

    @staticmethod
    def _touch(group, names: frozenset[str], name: str, operands: list[str]) -> None:
        """Warps are about to read or write registers that products take part in."""
        registers, waited = group.product_registers, group.products_waited
        if name == "mov" and registers.in_flight(operands[1], group.products_closed, waited):
            registers.copy(operands[0], operands[1], waited)
        else:
            registers.touch(names, waited)

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

    def _places(self, descriptor: int, rows: int, *, k_major: bool) -> np.ndarray:
        """[rows * 16, 2] bytes in shared memory by a matrix descriptor."""
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
        return self._locate("shared", address.reshape(-1), 2)[1]

    def _operand(self, descriptor: int, rows: int, element: str, *, k_major: bool) -> np.ndarray:
        """[rows, 16] from shared memory."""
        index = self._places(descriptor, rows, k_major=k_major)
        raw = self.shared.bytes[index].view(np.uint16).reshape(rows, 16)
        return as_float(raw, element)
