# SPDX-License-Identifier: Apache-2.0
"""The CUDA worker: vLLM's, with the tree runner."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_specplug.runtime.cuda_backend import CudaTreeBackend
from vllm_specplug.runtime.draft_cache import DraftKVLayer
from vllm_specplug.runtime.rehearsal import warm_up_draft
from vllm_specplug.runtime.runner import TreeRunnerMixin, require_seams
from vllm_specplug.runtime.tree_backend import TreeBackend
from vllm_specplug.seams import ATTENTION_BACKENDS
from vllm_specplug.verify.tree_rows import TreeAttentionMixin

logger = init_logger("vllm.specplug.worker")

# vLLM's attention backends that can hand tree rows over.
TREE_BACKENDS = (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN)


def claim_attention_backend(vllm_config: Any) -> None:
    """Registers the tree backends and picks FlashAttention where the user named none.

    Seam: gpu_backend.

    Raises:
        ValueError: for a backend that cannot hand tree rows over.
    """
    attention = vllm_config.attention_config
    if attention.backend is None:
        attention.backend = AttentionBackendEnum.FLASH_ATTN
    if attention.backend not in TREE_BACKENDS:
        names = " or ".join(b.name for b in TREE_BACKENDS)
        raise ValueError(
            f"--attention-backend {attention.backend.name} cannot verify trees. Use {names}, or "
            "leave it out."
        )
    ATTENTION_BACKENDS.apply()


class TreeGPUModelRunner(TreeRunnerMixin, GPUModelRunner):
    """vLLM's V1 CUDA runner, verifying trees."""

    def make_tree_backend(self) -> TreeBackend:
        return CudaTreeBackend(
            self.tree_spec.tree_kernel, self.num_query_heads, self.step_limits(), self.device
        )

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        context = self.compilation_config.static_forward_context
        for group in kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                layer = context[name]
                if isinstance(layer, DraftKVLayer):
                    continue
                if not isinstance(getattr(layer, "impl", None), TreeAttentionMixin):
                    raise ValueError(
                        f"Attention layer {name} runs {type(getattr(layer, 'impl', None)).__name__}"
                        ", which cannot verify trees. Use --attention-backend FLASH_ATTN or "
                        "TRITON_ATTN, and a target whose layers all have full attention."
                    )
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)


class TreeGPUWorker(Worker):
    """vLLM's CUDA worker. Seams: gpu_worker, gpu_backend."""

    def init_device(self) -> None:
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
