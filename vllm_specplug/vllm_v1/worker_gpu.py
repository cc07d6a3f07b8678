# SPDX-License-Identifier: Apache-2.0
"""The CUDA worker: vLLM's, with the tree runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_specplug.options import check_v2_feature
from vllm_specplug.seams import ATTENTION_BACKENDS
from vllm_specplug.vllm_v1.cuda_backend import CudaTreeBackend
from vllm_specplug.vllm_v1.rehearsal import (
    profile_largest_step,
    warm_up_draft,
    warm_up_sampling,
)
from vllm_specplug.vllm_v1.runner import TreeRunnerMixin
from vllm_specplug.vllm_v1.tree_backend import TreeBackend
from vllm_specplug.vllm_worker.start_up import require_seams

# vLLM's attention backends that can hand tree rows over.
TREE_BACKENDS = (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN)


def claim_attention_backend(vllm_config: Any) -> None:
    """Registers the tree backends and, where the user named none, picks FlashAttention, or Triton
    for float32, which FlashAttention does not have.

    Seam: gpu_backend.

    Raises:
        ValueError: for a backend that cannot hand tree rows over.
    """
    attention = vllm_config.attention_config
    if attention.backend is None:
        is_float32 = vllm_config.model_config.dtype == torch.float32
        attention.backend = (
            AttentionBackendEnum.TRITON_ATTN if is_float32 else AttentionBackendEnum.FLASH_ATTN
        )
    if attention.backend not in TREE_BACKENDS:
        names = " or ".join(b.name for b in TREE_BACKENDS)
        raise ValueError(
            f"--attention-backend {attention.backend.name} cannot verify trees. Use {names}, or "
            "leave it out."
        )
    ATTENTION_BACKENDS.apply()


class TreeGPUModelRunner(TreeRunnerMixin, GPUModelRunner):  # type: ignore[misc]  # overrides
    """vLLM's V1 CUDA runner, verifying trees."""

    tree_backend: CudaTreeBackend

    def make_tree_backend(self) -> TreeBackend:
        return CudaTreeBackend(
            self.tree_spec.tree_kernel,
            self.state.num_query_heads,
            self.step_limits(),
            self.device,
        )

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        # In a forward with trees; stock attention plans nothing of the kind in a profile run.
        workspace = self.tree_backend.make_workspace()
        super().profile_run(*args, **kwargs)
        del workspace
        profile_largest_step(self.state, self.planner.row_budget.max_step_rows)
        self.state.wait_for_device()


class TreeGPUWorker(Worker):
    """vLLM's CUDA worker. Seams: gpu_worker, gpu_backend."""

    device: Any
    model_runner: Any  # a TreeGPUModelRunner

    def init_device(self) -> None:
        spec: Any = self.vllm_config.speculative_config
        check_v2_feature(spec.plugin_method, uses_v2=self.use_v2_model_runner, asked=False)
        require_seams("cuda")
        claim_attention_backend(self.vllm_config)
        super().init_device()

    def _make_model_runner(self) -> TreeGPUModelRunner:
        return TreeGPUModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        # Before graphs are captured: a kernel that compiles during a capture would break it.
        self.model_runner.tree_backend.warm_up()
        return super().compile_or_warm_up_model()

    def _maybe_activate_jit_monitor(self) -> None:
        # Graphs are captured, and whatever compiles from here on is reported or raised by vLLM,
        # which has also seeded its generators for the requests to come.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            warm_up_sampling(self.model_runner.state)
            warm_up_draft(self.model_runner.state)
            self.model_runner.start_budget()
        super()._maybe_activate_jit_monitor()
