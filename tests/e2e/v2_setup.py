# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 for all engines of a process."""

from __future__ import annotations

import os
from functools import cache


@cache
def use_v2() -> None:
    """Engines that this process builds from here on run on V2, plain ones included: nobody else
    admits those on a CPU without Triton, or gives them kernels."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import vllm.v1.worker.gpu_worker as gpu_worker
    from vllm.triton_utils import HAS_TRITON

    from vllm_specplug.seams import CPU_ADMISSION, CPU_KERNELS

    if not HAS_TRITON:
        CPU_ADMISSION.apply()
        CPU_KERNELS.apply()
        # From 0.33 on; as the seam does it, which a worker of a tree method applies by itself.
        gpu_worker.HAS_TRITON = True
