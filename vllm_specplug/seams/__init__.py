# SPDX-License-Identifier: Apache-2.0
"""Every place where the package meets vLLM, as objects: checked, applied and undone in one way.

Every process applies `PROCESS_SEAMS`, or `REFUSAL` on an unsupported vLLM. Workers that verify
trees apply those that change something when they need them. What the code imports from vLLM is not
listed: `scripts/vllm_names.py` derives it from the code, and checking a replacement or a backend
imports it.
"""

from vllm_specplug.seams import listing_attention as attention
from vllm_specplug.seams import listing_runner as runner
from vllm_specplug.seams.listing_process import PROCESS_SEAMS, REFUSAL
from vllm_specplug.seams.seam import Seam, SeamSet

WORKER_SEAMS = {
    "cpu": SeamSet(
        (
            runner.CPU_RUNNER,
            runner.SPECULATOR,
            *runner.LOADED_GRAPHS.seams,
            *runner.CPU_KERNELS.seams,
            *runner.CPU_PRODUCTS.seams,
            *attention.CPU_BACKENDS.seams,
            *attention.CPU_MEMBERS,
            *runner.CPU_WORKER_MEMBERS,
            *runner.RUNNER_MEMBERS,
        )
    ),
    "cuda": SeamSet(
        (
            runner.DEVICE_SPECULATOR,
            runner.TREE_GRAPHS,
            *attention.ATTENTION_BACKENDS.seams,
            *attention.GPU_MEMBERS,
            *runner.GPU_WORKER_MEMBERS,
            *runner.RUNNER_MEMBERS,
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
            *attention.STATE_SEAMS.seams,
            *attention.CPU_STATE_SEAMS.seams,
            *attention.DEVICE_STATE_SEAMS.seams,
            *attention.LATENT_SEAMS["cpu"].seams,
            *attention.LATENT_SEAMS["cuda"].seams,
            runner.CPU_ADMISSION,
        )
    )
)
