# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's model runners trees take: the one that vLLM would take without them.

A seed's random numbers belong to the runner, and output must equal that of plain vLLM. vLLM takes
V2 where it is asked for, and where nobody asked for either wherever Triton serves the device (on
CUDA, and on a CPU with triton-cpu). What V2 cannot serve takes V1, or stops where V2 was asked for:
`SpecPlugSpeculativeConfig._lacks_on_v2`, and for what vLLM's own V2 lacks `model_runner.takes_v1`.
"""

from __future__ import annotations

from vllm.logger import init_logger

from vllm_specplug.seams import V2_CPU_ADMISSION
from vllm_specplug.seams.seam import resolve

logger = init_logger("vllm.specplug.config")


def asked_for_v2() -> bool | None:
    """What `VLLM_USE_V2_MODEL_RUNNER` says; None where it is not set."""
    from vllm import envs

    asked: bool | None = envs.VLLM_USE_V2_MODEL_RUNNER
    return asked


def takes_v2() -> bool:
    """Whether vLLM takes V2 for a config of which it supports everything."""
    asked = asked_for_v2()
    return bool(resolve(V2_CPU_ADMISSION.target)) if asked is None else asked


def log_fall_back(method: str, reason: str) -> None:
    """Says that trees take V1 where plain vLLM takes V2, and what that means."""
    logger.warning(
        "Speculative method %r takes vLLM's V1 model runner: %s. Plain vLLM would take V2 here, "
        "whose random numbers differ: seeded answers are those of plain vLLM with "
        "VLLM_USE_V2_MODEL_RUNNER=0.",
        method,
        reason,
    )
