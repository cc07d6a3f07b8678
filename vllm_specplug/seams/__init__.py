# SPDX-License-Identifier: Apache-2.0
"""Every place where the package meets vLLM, as objects: checked, applied and undone in one way."""

from vllm_specplug.seams.listing import (
    ALL_SEAMS,
    CPU_BACKENDS,
    PROCESS_SEAMS,
    REFUSAL,
    WORKER_SEAMS,
)
from vllm_specplug.seams.listing_gpu import ATTENTION_BACKENDS
from vllm_specplug.seams.listing_latent import LATENT_SEAMS
from vllm_specplug.seams.listing_products import CPU_PRODUCTS
from vllm_specplug.seams.listing_states import CPU_STATE_SEAMS, DEVICE_STATE_SEAMS, STATE_SEAMS
from vllm_specplug.seams.listing_v2 import (
    CPU_RUNNER,
    DEVICE_SPECULATOR,
    GRAPHS_OF_TREES,
    SPECULATOR,
    V2_CPU_ADMISSION,
    V2_CPU_KERNELS,
    V2_CPU_WORKER,
)
from vllm_specplug.seams.seam import Seam, SeamError, SeamSet

__all__ = [
    "ALL_SEAMS",
    "ATTENTION_BACKENDS",
    "CPU_BACKENDS",
    "CPU_PRODUCTS",
    "CPU_RUNNER",
    "CPU_STATE_SEAMS",
    "DEVICE_SPECULATOR",
    "DEVICE_STATE_SEAMS",
    "GRAPHS_OF_TREES",
    "LATENT_SEAMS",
    "PROCESS_SEAMS",
    "REFUSAL",
    "V2_CPU_ADMISSION",
    "V2_CPU_KERNELS",
    "V2_CPU_WORKER",
    "SPECULATOR",
    "STATE_SEAMS",
    "WORKER_SEAMS",
    "Seam",
    "SeamError",
    "SeamSet",
]
