# SPDX-License-Identifier: Apache-2.0
"""Steps Triton's kernels on the CPU: launches of the wrappers, compiled to PTX for a GPU that is
not there, in the variant that Triton would choose for these arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature, find_paths_if

from tests.ptx.ptx_machine import Machine, Timing
from tests.ptx.ptx_memory import GlobalMemory
from tests.ptx.triton_compiler import Answer, Compiler, Request
from vllm_specplug.kernels import tree_attn_triton
from vllm_specplug.kernels.kv_compact_triton import LayerCaches

# Shared memory of a block, which bounds tiles and stages.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
# The argument that holds addresses of tensors which are none themselves.
POINTERS = "addresses"


class Stepped:
    """In place of launches in Triton's interpreter."""

    def __init__(self, compiler: Compiler, arch: int, timing: Timing) -> None:
        self.arch, self.timing = arch, timing
        self.counts: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        # what a test does to the PTX of every kernel
        self.damage: Callable[[str], str] = str
        # reached by addresses in memory, not as arguments
        self.also: list[torch.Tensor] = []
        self._compiler = compiler
        self._backend = CUDABackend(GPUTarget("cuda", arch, 32))

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = kernel.fn.__name__
        chosen = ("do_not_specialize", "do_not_specialize_on_alignment")
        compiled = JITFunction(kernel.fn, **{c: kernel.kwargs.get(c) for c in chosen})
        bind = create_function_from_signature(compiled.signature, compiled.params, self._backend)
        bound, specialisation, _ = bind(*args, **kwargs)
        values = list(bound.values())
        kinds = [kind for kind, _ in specialisation]
        fixed = find_paths_if(kinds, lambda _, kind: kind == "constexpr")
        marks = ["" if kind == "constexpr" else mark for kind, mark in specialisation]
        marked = find_paths_if(marks, lambda _, mark: isinstance(mark, str))
        assert all(len(path) == 1 for path in (*fixed, *marked)), "arguments within arguments"
        answer = self._compiler(
            Request(
                module=kernel.fn.__module__,
                kernel=name,
                arch=self.arch,
                signature=dict(zip(bound, kinds, strict=True)),
                constants={(i,): values[i] for (i,) in fixed},
                attributes={(i,): self._backend.parse_attr(marks[i]) for (i,) in marked},
                options={k: v for k, v in kwargs.items() if k in ("num_warps", "num_stages")},
            )
        )
        passed = {n: bound[n] for n, k in zip(bound, kinds, strict=True) if k != "constexpr"}
        self.kernels[name] += 1
        self._step(answer, passed, (*(grid(bound) if callable(grid) else grid), 1, 1)[:3])

    def _step(self, answer: Answer, passed: dict[str, Any], grid: tuple[int, ...]) -> None:
        tensors = [value for value in passed.values() if isinstance(value, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t for t in (*tensors, *self.also)}
        sizes = {at: t.untyped_storage().nbytes() for at, t in storages.items()}
        memory = GlobalMemory(sum(sizes.values()) + 2048 * (len(sizes) + 2))
        raws = {
            at: torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            for at, tensor in storages.items()
        }

        def translate(address: int) -> int:
            for at, size in sizes.items():
                if at <= address < at + size:
                    return places[at] + address - at
            raise AssertionError("an address of nothing that the launch names")

        places = {at: memory.put(raw.numpy()) for at, raw in raws.items()}
        params = []
        for name, value in passed.items():
            if name == POINTERS:
                there = [translate(address) for address in value.flatten().tolist()]
                params.append(memory.put(np.array(there, np.int64)))
            else:
                params.append(
                    translate(value.data_ptr()) if isinstance(value, torch.Tensor) else value
                )
        machine = Machine(self.damage(answer.ptx), memory, answer.shared_bytes, self.timing)
        # Behind the arguments: memory that a launch would allocate, of which our kernels take none.
        params += [0] * (len(machine.program.params) - len(params))
        machine.launch(grid, params)
        self.counts += Counter(machine.counts)
        for at, raw in raws.items():
            raw.copy_(torch.from_numpy(memory.get(places[at], (sizes[at],), np.uint8)))


@contextmanager
def stepped(monkeypatch: Any, compiler: Compiler, arch: int, timing: Timing) -> Iterator[Stepped]:
    """Within it launches are stepped, and memory that torch allocates is NaN or the largest
    integer."""
    record = Stepped(compiler, arch, timing)
    with monkeypatch.context() as patched:
        patched.setattr(
            InterpretedFunction, "run", lambda self, *args, **kw: record.run(self, *args, **kw)
        )
        limits = (132, SHARED_BYTES[arch], arch // 10)
        patched.setitem(tree_attn_triton._LIMITS, torch.device("cpu"), limits)
        of = LayerCaches.of

        def remember(caches: list[tuple[torch.Tensor, torch.Tensor]]) -> LayerCaches:
            record.also = [half for pair in caches for half in pair]
            return of(caches)

        patched.setattr(LayerCaches, "of", staticmethod(remember))
        patched.setattr(deterministic, "fill_uninitialized_memory", True)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield record
        finally:
            torch.use_deterministic_algorithms(before)
