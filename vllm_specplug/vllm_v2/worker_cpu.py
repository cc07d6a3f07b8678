# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with the tree runner."""

from __future__ import annotations

# Must come first: it sets up shared memory before torch's threads start.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specplug.seams.listing_attention import CPU_BACKENDS, LATENT_SEAMS
from vllm_specplug.seams.listing_runner import (
    CPU_KERNELS,
    CPU_RUNNER,
    CPU_WORKER_ADMISSION,
    LOADED_GRAPHS,
    SPECULATOR,
)
from vllm_specplug.vllm_v2.backend import CpuTreeBackend, TreeBackend
from vllm_specplug.vllm_v2.runner import TreeRunnerMixin
from vllm_specplug.vllm_v2.stage import StageRunnerMixin
from vllm_specplug.vllm_worker.memory.drafter_memory import memory_for_caches
from vllm_specplug.vllm_worker.start_up import (
    OwnKernels,
    choose_kernel,
    require_seams,
    use_seams,
)
from vllm_specplug.vllm_worker.target.linear import takes_plain_rows
from vllm_specplug.vllm_worker.target.weight_updates import PacksTarget


class CPUStageRunner(StageRunnerMixin, CPUModelRunner):
    """vLLM's V2 CPU runner, verifying trees in an earlier pipeline stage."""

    def make_tree_backend(self) -> TreeBackend:
        if not self.model_config.use_mla:
            products = self.tree_spec.target_products
            return CpuTreeBackend(takes_plain_rows(products, self.model_config))
        from vllm_specplug.vllm_v2.latent_backend import LatentTreeBackend

        return LatentTreeBackend()


class TreeCPUModelRunner(TreeRunnerMixin, CPUStageRunner):  # type: ignore[misc]  # overrides
    """vLLM's V2 CPU runner, drafting and verifying trees."""


def tree_runner_factory(stock: type) -> Callable[..., CPUStageRunner]:
    """Returns a factory that replaces the class of V2's CPU runner. Seam: cpu_runner."""

    def build(*args: Any) -> CPUStageRunner:
        # The pipeline group does not exist before the worker builds its runner.
        return (TreeCPUModelRunner if get_pp_group().is_last_rank else CPUStageRunner)(*args)

    return build


class TreeCPUWorker(OwnKernels, PacksTarget, CPUWorker):
    """vLLM's CPU worker with the tree runner.

    Seams: cpu_runner, speculator, attention_backend, cpu_admission, cpu_kernels, cpu_products,
    cpu_worker, weight_updates.
    """

    model_runner: Any  # built by `tree_runner_factory`
    model_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if HAS_TRITON else CPU_WORKER_ADMISSION.applied():
            super().__init__(*args, **kwargs)

    def determine_available_memory(self) -> int:
        """Returns vLLM's result minus the drafters' own memory, which the KV cache must not get."""
        available: int = super().determine_available_memory()
        if not get_pp_group().is_last_rank:
            return available
        return memory_for_caches(self.model_runner.state, available)

    def synchronize_device(self) -> None:
        # Every pause ends with this call. After it, new requests may read any cached block.
        self.model_runner.settle()
        super().synchronize_device()

    def compile_or_warm_up_model(self) -> Any:
        # From 0.33 on vLLM warms up its Triton kernels with steps that may not fit small limits.
        # The kernels that replace them here are compiled already.
        kernels: Any = getattr(self.vllm_config, "kernel_config", None)
        if not HAS_TRITON and hasattr(kernels, "enable_jit_warmup"):
            kernels.enable_jit_warmup = False
        times = super().compile_or_warm_up_model()
        # vLLM has seeded the generators for requests.
        with torch.random.fork_rng([]):
            self.model_runner.start_budget()
        return times

    def init_device(self) -> None:
        spec: Any = self.vllm_config.speculative_config
        choose_kernel(spec.tree_kernel, self.model_config.dtype)
        require_seams("cpu", self.use_v2_model_runner)
        CPU_BACKENDS.apply()
        LOADED_GRAPHS.apply()
        if self.model_config.use_mla:
            # Before the model's layers choose their backend.
            use_seams("latent attention", LATENT_SEAMS["cpu"])
        if not HAS_TRITON:
            CPU_KERNELS.apply()
        with CPU_RUNNER.applied(), SPECULATOR.applied():
            super().init_device()
