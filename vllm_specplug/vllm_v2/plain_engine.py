# SPDX-License-Identifier: Apache-2.0
"""Plain engines on the model runner of the tree methods, for comparisons."""

from __future__ import annotations

import importlib
import os
from functools import cache


@cache
def use_v2() -> None:
    """Makes every engine that this process builds from now on run on V2, plain ones included.

    On a CPU without Triton vLLM has no kernels for V2 and refuses it, so plain engines get the
    kernels of this package. In V1, seeded answers of plain vLLM would differ from those of trees.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from vllm.triton_utils import HAS_TRITON

    from vllm_specplug.seams.listing_runner import CPU_ADMISSION, CPU_KERNELS, CPU_WORKER_ADMISSION

    if not HAS_TRITON:
        CPU_ADMISSION.apply()
        CPU_KERNELS.apply()
        # From 0.33 on. Not by applying the seam, which workers of tree methods apply temporarily.
        module = importlib.import_module(CPU_WORKER_ADMISSION.target.partition(":")[0])
        setattr(module, "HAS_TRITON", True)  # noqa: B010 - vLLM 0.32 declares none
