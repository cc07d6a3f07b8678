# SPDX-License-Identifier: Apache-2.0
"""The CPU worker: vLLM's, with the tree runner."""

from __future__ import annotations

# Must come first: it sets up shared memory before torch's threads start.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specplug.options import check_v2_feature
from vllm_specplug.seams import CPU_BACKENDS, CPU_RUNNER
from vllm_specplug.vllm_v1.runner import TreeRunnerMixin
from vllm_specplug.vllm_v1.tree_backend import CpuTreeBackend, TreeBackend
from vllm_specplug.vllm_worker.drafter_memory import memory_for_caches
from vllm_specplug.vllm_worker.linear import takes_plain_rows
from vllm_specplug.vllm_worker.start_up import (
    OwnKernels,
    choose_kernel,
    require_seams,
    use_latent_seams,
)
from vllm_specplug.vllm_worker.weight_updates import PacksTarget

logger = init_logger("vllm.specplug.worker")

CPU = torch.device("cpu")


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):  # type: ignore[misc]  # overrides
    """vLLM's CPU runner, verifying trees."""

    def make_tree_backend(self) -> TreeBackend:
        if self.model_config.use_mla:
            from vllm_specplug.vllm_v1.latent_backend import LatentTreeBackend

            return LatentTreeBackend()
        if self.tree_spec.tree_kernel != "triton":
            products = self.tree_spec.target_products
            return CpuTreeBackend(takes_plain_rows(products, self.model_config))
        from vllm_specplug.vllm_v1.interpreted_backend import InterpretedTreeBackend
        from vllm_specplug.vllm_worker.cuda_backend import StepLimits

        limits = StepLimits.of(self.state)
        return InterpretedTreeBackend("triton", self.state.num_query_heads, limits, CPU)


def tree_runner_class(stock: type) -> type:
    """What vLLM's worker builds instead of its own runner. Seam: cpu_runner."""
    return TreeCPUModelRunner


class TreeCPUWorker(OwnKernels, PacksTarget, CPUWorker):
    """vLLM's CPU worker; it names its runner class as a module global.

    Seams: cpu_runner, cpu_backend, cpu_products, cpu_worker, weight_updates.
    """

    model_runner: Any  # a TreeCPUModelRunner
    model_config: Any

    def determine_available_memory(self) -> int:
        """vLLM's, less what drafters keep of their own: it comes out of the memory for caches."""
        return memory_for_caches(self.model_runner.state, super().determine_available_memory())

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.start_budget()
        return times

    def init_device(self) -> None:
        spec: Any = self.vllm_config.speculative_config
        check_v2_feature(spec.plugin_method, uses_v2=self.use_v2_model_runner, asked=False)
        choose_kernel(spec.tree_kernel, self.model_config.dtype)
        require_seams("cpu")
        CPU_BACKENDS.apply()
        if self.model_config.use_mla:
            use_latent_seams()
        with CPU_RUNNER.applied():
            super().init_device()
