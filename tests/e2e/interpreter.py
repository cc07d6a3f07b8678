# SPDX-License-Identifier: Apache-2.0
"""Stock Model Runner V2 on a CPU without triton-cpu: its kernels in Triton's interpreter.

For tests, which compare with vLLM as it is. Call `install` before vLLM is imported.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

from tests.quick_interpreter import quick_interpreter

# What is entered for the life of the process.
_ENTERED = ExitStack()


def install() -> None:
    """Gives this process a Triton backend "cpu", which vLLM looks for, and the interpreter. What it
    has it keeps."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "vllm" in sys.modules:
        return
    assert "vllm" not in sys.modules, "vLLM has decided on Triton already"
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver, interpreter

    class CpuDriver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_benchmarker(self) -> None:
            return None

        def map_python_to_cpp_type(self, ty: Any) -> str:
            return "int"

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: Any) -> None:
            pass

        def get_current_stream(self, device: Any = None) -> int:
            return 0

    class CpuBackend:
        driver = CpuDriver
        compiler = None

    triton.backends.backends["cpu"] = CpuBackend()
    driver.set_active(CpuDriver())
    _ENTERED.enter_context(quick_interpreter())
    # The interpreter takes masks of bools alone; some kernels of vLLM's have integers.
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    builder.create_masked_load = lambda self, ptr, mask, *rest: load(
        self, ptr, _as_bool(mask), *rest
    )
    builder.create_masked_store = lambda self, ptr, value, mask, *rest: store(
        self, ptr, value, _as_bool(mask), *rest
    )


def _as_bool(mask: Any) -> Any:
    if mask.data.dtype != bool:
        mask.data = mask.data.astype(bool)
    return mask
