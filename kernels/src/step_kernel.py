# SPDX-License-Identifier: Apache-2.0
"""`triton.jit` for kernels on tensors of a step, which start at any address and have any size."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def step_kernel(kernel: Callable[..., Any]) -> Any:
    """Compiles a kernel of which only types and constants make variants, so that no step compiles
    one that start-up did not."""
    arguments = [
        parameter.name
        for parameter in inspect.signature(kernel).parameters.values()
        if parameter.annotation != "tl.constexpr"
    ]
    return triton.jit(kernel, do_not_specialize=arguments, do_not_specialize_on_alignment=arguments)
