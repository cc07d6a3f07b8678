# SPDX-License-Identifier: Apache-2.0
"""Records the variants of Triton kernels that launches would compile on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from vllm_specplug.kernels import tree_attn_triton

# Multiprocessors, shared memory of a block and major capability, by capability.
DEVICES = {80: (108, 163 * 1024, 8), 90: (132, 227 * 1024, 9), 100: (148, 227 * 1024, 10)}


@dataclass(frozen=True)
class Variant:
    """What Triton compiles; arguments by position."""

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, int]


class Launches:
    """In place of launches: what of each Triton would compile a variant of its own for, by its own
    rules for a GPU. Kernels do not run, so what they would write holds anything."""

    def __init__(self, patch: pytest.MonkeyPatch, arch: int = 90) -> None:
        self.keys: set[tuple[Any, ...]] = set()
        self.variants: dict[tuple[Any, ...], Variant] = {}
        self._backend = CUDABackend(GPUTarget("cuda", arch, 32))
        self._binders: dict[str, Any] = {}
        patch.setattr(
            InterpretedFunction, "run", lambda kernel, *a, **k: self._run(kernel, *a, **k)
        )
        # Contexts are split as on the device.
        patch.setitem(tree_attn_triton._LIMITS, torch.device("cpu"), DEVICES[arch])

    def _run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = kernel.fn.__name__
        if name not in self._binders:
            chosen = ("do_not_specialize", "do_not_specialize_on_alignment")
            compiled = JITFunction(kernel.fn, **{c: kernel.kwargs.get(c) for c in chosen})
            binder = create_function_from_signature(
                compiled.signature, compiled.params, self._backend
            )
            self._binders[name] = binder
        bound, specialisation, options = self._binders[name](*args, **kwargs)
        key = (name, *specialisation, *sorted(options.items()))
        self.keys.add(key)
        if key in self.variants:
            return
        kinds = [kind for kind, _ in specialisation]
        values = list(bound.values())
        self.variants[key] = Variant(
            module=kernel.fn.__module__,
            kernel=name,
            signature=dict(zip(bound, kinds, strict=True)),
            constants={(i,): values[i] for i, kind in enumerate(kinds) if kind == "constexpr"},
            attributes={
                (i,): self._backend.parse_attr(mark)
                for i, (kind, mark) in enumerate(specialisation)
                if kind != "constexpr" and isinstance(mark, str)
            },
            options={k: v for k, v in kwargs.items() if k in ("num_warps", "num_stages")},
        )

    def taken(self) -> set[tuple[Any, ...]]:
        """Returns the keys of the launches since the last call."""
        keys, self.keys = self.keys, set()
        return keys
