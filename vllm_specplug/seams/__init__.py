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
from vllm_specplug.seams.listing_runner import (
    CPU_ADMISSION,
    CPU_KERNELS,
    CPU_RUNNER,
    CPU_WORKER_ADMISSION,
    DEVICE_SPECULATOR,
    SPECULATOR,
    TREE_GRAPHS,
)
from vllm_specplug.seams.listing_states import CPU_STATE_SEAMS, DEVICE_STATE_SEAMS, STATE_SEAMS
from vllm_specplug.seams.seam import Seam, SeamError, SeamSet

__all__ = [
    "ALL_SEAMS",
    "ATTENTION_BACKENDS",
    "CPU_ADMISSION",
    "CPU_BACKENDS",
    "CPU_KERNELS",
    "CPU_PRODUCTS",
    "CPU_RUNNER",
    "CPU_STATE_SEAMS",
    "CPU_WORKER_ADMISSION",
    "DEVICE_SPECULATOR",
    "DEVICE_STATE_SEAMS",
    "TREE_GRAPHS",
    "LATENT_SEAMS",
    "PROCESS_SEAMS",
    "REFUSAL",
    "SPECULATOR",
    "STATE_SEAMS",
    "WORKER_SEAMS",
    "Seam",
    "SeamError",
    "SeamSet",
]
