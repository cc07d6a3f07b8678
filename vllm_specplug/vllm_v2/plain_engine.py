# SPDX-License-Identifier: Apache-2.0
"""Plain engines to compare trees with, on the model runner that trees take."""

from __future__ import annotations

import importlib
import os
from functools import cache


@cache
def use_v2() -> None:
    """Makes every engine that this process builds from here on run on V2, plain ones included.

    On a CPU without Triton vLLM refuses V2, and a plain engine has no kernels there: it gets those
    of this package. Without it, seeded answers of trees and of plain vLLM differ on such a CPU.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from vllm.triton_utils import HAS_TRITON

    from vllm_specplug.seams import CPU_ADMISSION, CPU_KERNELS, CPU_WORKER_ADMISSION

    if not HAS_TRITON:
        CPU_ADMISSION.apply()
        CPU_KERNELS.apply()
        # From 0.33 on. Not by the seam itself, which workers of tree methods apply for a moment.
        module = importlib.import_module(CPU_WORKER_ADMISSION.target.partition(":")[0])
        setattr(module, "HAS_TRITON", True)  # noqa: B010 - vLLM 0.32 declares none
