# SPDX-License-Identifier: Apache-2.0
"""Every place where the package meets vLLM, as objects: checked, applied and undone in one way.

Every process applies `PROCESS_SEAMS`, or `REFUSAL` on an unsupported vLLM. Workers that verify
trees apply those that change something when they need them. What the code imports from vLLM is not
listed: `scripts/vllm_names.py` derives it from the code, and checking a replacement or a backend
imports it.
"""

from vllm_specplug.seams.listing_attention import (
    ATTENTION_BACKENDS,
    CPU_BACKENDS,
    CPU_MEMBERS,
    CPU_STATE_SEAMS,
    DEVICE_STATE_SEAMS,
    GPU_MEMBERS,
    LATENT_SEAMS,
    STATE_SEAMS,
)
from vllm_specplug.seams.listing_process import PROCESS_SEAMS, REFUSAL
from vllm_specplug.seams.listing_runner import (
    CPU_ADMISSION,
    CPU_KERNELS,
    CPU_PRODUCTS,
    CPU_RUNNER,
    CPU_WORKER_ADMISSION,
    CPU_WORKER_MEMBERS,
    DEVICE_SPECULATOR,
    GPU_WORKER_MEMBERS,
    RUNNER_MEMBERS,
    SPECULATOR,
    TREE_GRAPHS,
)
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
    "LATENT_SEAMS",
    "PROCESS_SEAMS",
    "REFUSAL",
    "SPECULATOR",
    "STATE_SEAMS",
    "TREE_GRAPHS",
    "WORKER_SEAMS",
    "Seam",
    "SeamError",
    "SeamSet",
]

WORKER_SEAMS = {
    "cpu": SeamSet(
        (
            CPU_RUNNER,
            SPECULATOR,
            *CPU_KERNELS.seams,
            *CPU_PRODUCTS.seams,
            *CPU_BACKENDS.seams,
            *CPU_MEMBERS,
            *CPU_WORKER_MEMBERS,
            *RUNNER_MEMBERS,
        )
    ),
    "cuda": SeamSet(
        (
            DEVICE_SPECULATOR,
            TREE_GRAPHS,
            *ATTENTION_BACKENDS.seams,
            *GPU_MEMBERS,
            *GPU_WORKER_MEMBERS,
            *RUNNER_MEMBERS,
        )
    ),
}
"""Seams of a worker that verifies trees, by device, in addition to those of every process."""

ALL_SEAMS: tuple[Seam, ...] = tuple(
    dict.fromkeys(
        (
            *PROCESS_SEAMS.seams,
            *REFUSAL.seams,
            *WORKER_SEAMS["cpu"].seams,
            *WORKER_SEAMS["cuda"].seams,
            *STATE_SEAMS.seams,
            *CPU_STATE_SEAMS.seams,
            *DEVICE_STATE_SEAMS.seams,
            *LATENT_SEAMS["cpu"].seams,
            *LATENT_SEAMS["cuda"].seams,
            CPU_ADMISSION,
        )
    )
)
