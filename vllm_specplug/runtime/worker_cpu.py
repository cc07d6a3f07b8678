# SPDX-License-Identifier: Apache-2.0
"""The CPU worker: vLLM's, with the tree runner."""

from __future__ import annotations

# Must come first: it sets up shared memory before torch's threads start.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip
import os
from typing import Any

import torch
import vllm.v1.attention.selector as selector
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specplug.config import option_error
from vllm_specplug.kernels import describe
from vllm_specplug.kernels.extension import ISA_VARIABLE
from vllm_specplug.runtime.runner import TreeRunnerMixin

logger = init_logger("vllm.specplug.worker")


def choose_kernel(name: str, dtype: torch.dtype) -> None:
    """Applies option `tree_kernel` and says which kernel serves.

    Raises:
        ValueError: when "cpp" is asked for and there is no compiled kernel.
    """
    if name == "reference":
        os.environ[ISA_VARIABLE] = "reference"
    chosen = describe(dtype)
    if name == "cpp" and chosen["kernel"] != "cpp":
        raise option_error(
            "tree_kernel",
            name,
            f"the compiled kernels are not available here ({chosen['reason']})",
            'Reinstall with a C++17 compiler, or use "auto"',
        )
    logger.info(
        "Tree attention: %s kernel, %s (%s)", chosen["kernel"], chosen["isa"], chosen["reason"]
    )


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """vLLM's CPU runner, verifying trees."""


class TreeCPUWorker(CPUWorker):
    """vLLM's CPU worker; it names its runner class as a module global.

    Ledger: cpu_runner, cpu_backend.
    """

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.start_budget()
        return times

    def init_device(self) -> None:
        spec = self.vllm_config.speculative_config
        choose_kernel(spec.tree_kernel, self.model_config.dtype)
        register_backend(
            AttentionBackendEnum.CPU_ATTN, "vllm_specplug.verify.cpu.TreeCPUAttentionBackend"
        )
        # An engine that this process built before has the stock backend in the selector's cache,
        # and stock attention would take a tree for a line without a word.
        selector._cached_get_attn_backend.cache_clear()
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = TreeCPUModelRunner  # type: ignore[misc]
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock  # type: ignore[misc]
