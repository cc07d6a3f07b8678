# SPDX-License-Identifier: Apache-2.0
"""The CUDA worker: vLLM's, with the tree runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_specplug.options import check_model_runner
from vllm_specplug.seams import ATTENTION_BACKENDS
from vllm_specplug.vllm_v1.cuda_backend import CudaTreeBackend
from vllm_specplug.vllm_v1.rehearsal import warm_up_draft
from vllm_specplug.vllm_v1.runner import TreeRunnerMixin, require_seams
from vllm_specplug.vllm_v1.tree_backend import TreeBackend

logger = init_logger("vllm.specplug.worker")

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

    def make_tree_backend(self) -> TreeBackend:
        return CudaTreeBackend(
            self.tree_spec.tree_kernel, self.num_query_heads, self.step_limits(), self.device
        )


class TreeGPUWorker(Worker):
    """vLLM's CUDA worker. Seams: gpu_worker, gpu_backend."""

    device: Any
    model_runner: Any  # a TreeGPUModelRunner

    def init_device(self) -> None:
        spec: Any = self.vllm_config.speculative_config
        check_model_runner(spec.plugin_method, uses_v2=self.use_v2_model_runner)
        require_seams("cuda")
        claim_attention_backend(self.vllm_config)
        super().init_device()

    def _make_model_runner(self) -> TreeGPUModelRunner:
        return TreeGPUModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        # Before graphs are captured: a kernel that compiles during a capture would break it.
        self.model_runner.tree_backend.warm_up()
        times = super().compile_or_warm_up_model()
        try:
            warm_up_draft(self.model_runner)
        except ValueError:
            # No kernel takes the head: better found out here than while serving.
            raise
        except Exception as error:
            logger.warning(
                "Drafting could not be warmed up (%s: %s); the first drafts will be slow",
                type(error).__name__,
                error,
            )
        try:
            self.model_runner.start_budget()
        except Exception as error:
            logger.warning(
                "Tree budget: step costs could not be measured (%s: %s); trees take a fixed "
                "budget of num_speculative_tokens nodes",
                type(error).__name__,
                error,
            )
        return times
