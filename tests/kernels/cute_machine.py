# SPDX-License-Identifier: Apache-2.0
"""Runs planned launches of the CuTe kernels on the CPU: compiled to PTX, stepped by `Machine`."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from tests.kernels.ptx_machine import Machine, Timing
from tests.kernels.ptx_memory import GlobalMemory, TensorMap
from vllm_specplug.kernels.cute.compile import Compiled, compile_config
from vllm_specplug.kernels.cute.launch import Launch, TensorMapSpec
from vllm_specplug.kernels.cute.launch_params import (
    ADDRESS,
    COMBINE_PARAMETERS,
    FORWARD_PARAMETERS,
)


@cache
def compiled(config) -> Compiled:
    return compile_config(config)


class HostDevice:
    """Memory of a pretended device: tensors are copied in, launches see them by their address."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t for t in tensors if t is not None}
        sizes = {p: t.untyped_storage().nbytes() for p, t in storages.items()}
        self.memory = GlobalMemory(sum(sizes.values()) + 2048 * (len(sizes) + 1))
        self.regions = []
        for pointer, tensor in storages.items():
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self.regions.append((pointer, sizes[pointer], self.memory.put(raw.numpy()), raw))

    def translate(self, address: int) -> int:
        if address == 0:
            return 0
        for pointer, size, place, _ in self.regions:
            if pointer <= address < pointer + size:
                return place + address - pointer
        raise AssertionError("a launch names memory that the test did not put on the device")

    def run(self, launches: list[Launch], timing: Timing | None = None) -> list[Machine]:
        machines = []
        for launch in launches:
            kernel = compiled(launch.config)
            machine = Machine(
                kernel.ptx, self.memory, launch.config.shared_bytes, timing or Timing()
            )
            machine.launch(launch.grid, self.arguments(launch, kernel))
            machines.append(machine)
        for _, size, place, raw in self.regions:
            raw.copy_(torch.from_numpy(self.memory.get(place, (size,), np.uint8)))
        return machines

    def arguments(self, launch: Launch, kernel: Compiled) -> list:
        named = FORWARD_PARAMETERS if hasattr(launch.config, "tma") else COMBINE_PARAMETERS
        maps = [a for a in launch.arguments if isinstance(a, TensorMapSpec)]
        scalars = list(launch.arguments[len(maps) :])
        for i, (_, kind) in enumerate(named):
            if kind == ADDRESS:
                scalars[i] = self.translate(scalars[i])
        values = iter(
            [
                *(
                    TensorMap(
                        self.translate(m.address), m.extents, m.strides, m.box, m.swizzle_bytes
                    )
                    for m in maps
                ),
                *scalars,
            ]
        )
        return [0 if size == 1 else next(values) for size in kernel.param_bytes]
