# SPDX-License-Identifier: Apache-2.0
"""Runs planned launches of the CuTe kernels on the CPU: compiled to PTX, stepped by `Machine`."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import torch

from tests.kernels.cute_schedule import Batch, record_of, tiles_of, up
from tests.kernels.device_trees import DeviceTrees
from tests.ptx.ptx_machine import Machine, Timing
from tests.ptx.ptx_memory import GlobalMemory, TensorMap
from vllm_specplug.kernels import AttnFeatures
from vllm_specplug.kernels.cuda_contract import PLAN_CONTEXT, PLAN_ROW_COUNT
from vllm_specplug.kernels.cute.compile import CompiledKernel, compile_config
from vllm_specplug.kernels.cute.launch import (
    Arguments,
    GridSplit,
    Launch,
    TensorMapSpec,
    plan_launches,
)
from vllm_specplug.kernels.cute.launch_params import (
    ADDRESS,
    COMBINE_PARAMETERS,
    FORWARD_PARAMETERS,
)

BF16, FP16 = torch.bfloat16, torch.float16

# Copies as late as allowed show a wait that is missing, as early as possible a stage that is
# overwritten while it is read.
LATE = Timing(eager_copies=False, eager_products=True)
EARLY = Timing(eager_copies=True, eager_products=False, reverse_warpgroups=True)


@cache
def compiled(config) -> CompiledKernel:
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

    def run(self, launches: list[Launch], timing: Timing) -> list[Machine]:
        machines = []
        for launch in launches:
            kernel = compiled(launch.config)
            machine = Machine(kernel.ptx, self.memory, launch.config.shared_bytes, timing)
            machine.launch(launch.grid, self.arguments(launch, kernel))
            machines.append(machine)
        for _, size, place, raw in self.regions:
            raw.copy_(torch.from_numpy(self.memory.get(place, (size,), np.uint8)))
        return machines

    def arguments(self, launch: Launch, kernel: CompiledKernel) -> list:
        named = FORWARD_PARAMETERS if hasattr(launch.config, "box") else COMBINE_PARAMETERS
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


class MachineTrees(DeviceTrees):
    """Trees that are answered by stepping the launches."""

    # Weights and outputs are rounded once each, to 8 or 11 bits; inputs are standard normal.
    limits = {BF16: 1.6e-2, FP16: 2e-3}
    timing = LATE

    def run(
        self,
        output: torch.Tensor,
        *,
        splits: int | None = 1,
        skipped: int = 0,
        timing: Timing | None = None,
        features: AttnFeatures | None = None,
    ) -> Counter[str]:
        """Returns how often each instruction ran."""
        told = features or self.features
        meta = self.metadata(skipped)
        parts: list[torch.Tensor] = []

        def workspace(count: int, rows: int, heads: int, head_dim: int, trees: int):
            parts.append(torch.full((count, rows, heads, head_dim), float("nan")))
            parts.append(torch.full((count, rows, heads), float("nan")))
            parts.append(torch.full((trees, 2), -1, dtype=torch.int32))
            return parts

        tail = (self.tail.get("tail_key"), self.tail.get("tail_value"))
        inputs = (self.query, self.key_cache, self.value_cache, output)
        arguments = Arguments(*inputs, meta, self.scale, *tail, features=told)
        launches = plan_launches(arguments, 132, workspace, splits)
        tables = (meta.plan, meta.parent_rows, meta.block_table, told.sinks, told.alibi_slopes)
        machines = HostDevice([*inputs, *tail, *tables, *parts]).run(
            launches, timing or self.timing
        )
        if parts:
            self.check_record(meta.plan, launches[0], parts[2])
        return sum((Counter(machine.counts) for machine in machines), Counter())

    def check_record(self, plan: torch.Tensor, launch: Launch, record: torch.Tensor) -> None:
        """The kernel came to the schedule of the simulation."""
        names = [name for name, _ in FORWARD_PARAMETERS]
        told = dict(zip(names, launch.arguments[-len(names) :], strict=True))
        pairs = list(zip(plan[PLAN_CONTEXT].tolist(), plan[PLAN_ROW_COUNT].tolist(), strict=True))
        dense, window = bool(told["dense"]), told["window"]
        batch = Batch(
            [tiles_of(c, r, dense=dense, window=window) for c, r in pairs],
            [up(r * told["group"], launch.config.tile_m) for _, r in pairs],
            told["num_kv_heads"],
            told["resident_ctas"],
        )
        expected = record_of(batch, GridSplit(told["forced_parts"], told["slots"], 0))
        found = dict(enumerate(record.tolist()))
        assert {tree: found[tree] for tree in expected} == expected


def ran(counts: Counter[str], fragment: str) -> int:
    return sum(count for opcode, count in counts.items() if fragment in opcode)
