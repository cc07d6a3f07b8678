# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 for all engines of a process."""

from __future__ import annotations

import os
from functools import cache

from vllm_specplug.drafting.method import Capability
from vllm_specplug.registry import get_method, method_names

# What V2 does not give a drafter; `use_v2` compares it with the adapter, which imports vLLM.
_MISSING = frozenset({Capability.TARGET_FORWARD})


def methods_on_v2() -> list[str]:
    """The methods that V2 serves."""
    return [name for name in method_names() if not get_method(name).needs & _MISSING]


@cache
def use_v2() -> None:
    """Engines that this process builds from here on run on V2, plain ones included: nobody else
    admits those on a CPU without Triton, or gives them kernels."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import vllm.v1.worker.gpu_worker as gpu_worker
    from vllm.triton_utils import HAS_TRITON

    from vllm_specplug.seams import V2_CPU_ADMISSION, V2_CPU_KERNELS
    from vllm_specplug.vllm_process.spec_config import CAPABILITIES_V2

    assert CAPABILITIES_V2["cpu"] == frozenset(Capability) - _MISSING
    if not HAS_TRITON:
        V2_CPU_ADMISSION.apply()
        V2_CPU_KERNELS.apply()
        # From 0.33 on; as the seam does it, which a worker of a tree method applies by itself.
        gpu_worker.HAS_TRITON = True
