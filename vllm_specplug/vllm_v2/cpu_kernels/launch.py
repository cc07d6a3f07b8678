# SPDX-License-Identifier: Apache-2.0
"""Replacements for Triton kernels on a CPU: launched like a kernel, they call a function."""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, ...]
# Parameters that describe memory and launch grids, which most functions leave out.
_IS_LAYOUT = re.compile("stride|BLOCK")


def kernel_parameters(kernel: Any) -> tuple[str, ...]:
    """Returns the names of a Triton kernel's parameters, also without Triton."""
    return tuple(inspect.signature(getattr(kernel, "fn", kernel)).parameters)


class CpuKernel:
    """`kernel[grid](*arguments, **constants)` as a call of `function` with the arguments it names.

    Pointer parameters receive the tensors themselves, so a function may leave out strides and block
    sizes. A parameter with a default is one that a supported release lacks.

    Args:
        parameters: names of the parameters of vLLM's kernel.
    """

    def __init__(self, function: Callable[..., None], parameters: tuple[str, ...] = ()) -> None:
        self.function = function
        self.parameters = parameters
        self._own = inspect.signature(function).parameters

    def misfit(self, stock: Any) -> str | None:
        """Returns how the parameters of a kernel of vLLM's differ from the function's; None if they
        do not."""
        given, own = {*kernel_parameters(stock)}, {*self._own} - {"grid"}
        optional = {n for n, one in self._own.items() if one.default is not inspect.Parameter.empty}
        unknown = sorted(name for name in given - own if not _IS_LAYOUT.search(name))
        missing = sorted(own - optional - given)
        parts = [f"unknown {', '.join(unknown)}"] if unknown else []
        parts += [f"no {', '.join(missing)}"] if missing else []
        return f"its parameters differ: {'; '.join(parts)}" if parts else None

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, *arguments: Any, **constants: Any) -> None:
        given = {**dict(zip(self.parameters, arguments, strict=False)), **constants, "grid": grid}
        self.function(**{name: given[name] for name in self._own if name in given})

    def __call__(self, stock: Any) -> CpuKernel:
        """Returns the replacement of a kernel, for `Replace`."""
        return CpuKernel(self.function, kernel_parameters(stock))


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
