# SPDX-License-Identifier: Apache-2.0
"""The CPU worker: vLLM's, with the tree runner."""

from __future__ import annotations

# Must come first: it sets up shared memory before torch's threads start.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specplug.runtime.runner import TreeRunnerMixin


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """vLLM's CPU runner, verifying trees."""


class TreeCPUWorker(CPUWorker):
    """vLLM's CPU worker; it names its runner class as a module global.

    Ledger: cpu_runner, cpu_backend.
    """

    def init_device(self) -> None:
        register_backend(
            AttentionBackendEnum.CPU_ATTN, "vllm_specplug.verify.cpu.TreeCPUAttentionBackend"
        )
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = TreeCPUModelRunner  # type: ignore[misc]
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock  # type: ignore[misc]
