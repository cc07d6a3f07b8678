# SPDX-License-Identifier: Apache-2.0
"""Replacements for Triton kernels on a CPU: launched like a kernel, they call a function."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, ...]


class CpuKernel:
    """`kernel[grid](*arguments, **constants)` as a call of `function(grid, *arguments, ...)`.

    Pointer parameters receive the tensors themselves.

    Args:
        added: parameters that vLLM 0.32 does not have; the function has defaults for them.
    """

    def __init__(self, function: Callable[..., None], added: tuple[str, ...] = ()) -> None:
        self.function = function
        latest = tuple(inspect.signature(function).parameters)[1:]
        # Parameters that the kernel may have in the releases that are supported, the latest first.
        self.forms = (latest, tuple(name for name in latest if name not in added))

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, *arguments: Any, num_warps: int = 1, **constants: Any) -> None:
        self.function(grid, *arguments, **constants)

    def __call__(self, stock: Any) -> CpuKernel:
        """Returns the replacement of a kernel, for `Replace`."""
        return self


def array_at(address: int, *shape: int) -> NDArray[np.int32]:
    """Returns int32 numbers at an address. vLLM passes some tensors as addresses."""
    count = int(np.prod(shape))
    buffer = (ctypes.c_int32 * count).from_address(address)
    return np.frombuffer(memoryview(buffer), dtype=np.int32).reshape(shape)


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least `number`; 0 for 0, as in Triton."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


def make_next_power_of_2(stock: None) -> Callable[[int], int]:
    """Returns the function that vLLM's placeholder for Triton lacks. Seam: cpu_kernels."""
    return next_power_of_2


def triton_stands_in(stock: bool) -> bool:
    """Replaces vLLM's flag whether Triton is installed by true. Seam: cpu_admission."""
    return True
