# SPDX-License-Identifier: Apache-2.0
"""The CUDA worker: vLLM's, with the tree runner."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_specplug.options import check_v2_feature
from vllm_specplug.vllm_v1.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_v1.rehearsal import warm_up_sampling
from vllm_specplug.vllm_v1.runner import TreeRunnerMixin
from vllm_specplug.vllm_v1.tree_backend import TreeBackend
from vllm_specplug.vllm_worker.attention_backend import claim_attention_backend
from vllm_specplug.vllm_worker.cuda_backend import StepLimits
from vllm_specplug.vllm_worker.rehearsal import profile_largest_step, warm_up_draft
from vllm_specplug.vllm_worker.start_up import require_seams
from vllm_specplug.vllm_worker.weight_updates import FollowsTarget


class TreeGPUModelRunner(TreeRunnerMixin, GPUModelRunner):  # type: ignore[misc]  # overrides
    """vLLM's V1 CUDA runner, verifying trees."""

    tree_backend: CudaTreeBackend

    def make_tree_backend(self) -> TreeBackend:
        return CudaTreeBackend(
            self.tree_spec.tree_kernel,
            self.state.num_query_heads,
            StepLimits.of(self.state),
            self.device,
        )

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        # In a forward with trees; stock attention plans nothing of the kind in a profile run.
        workspace = self.tree_backend.make_workspace()
        super().profile_run(*args, **kwargs)
        del workspace
        rows = self.planner.row_budget.max_step_rows
        profile_largest_step(self.state, rows, partial(warm_up_sampling, self.state))
        self.state.wait_for_device()


class TreeGPUWorker(FollowsTarget, Worker):
    """vLLM's CUDA worker. Seams: gpu_worker, gpu_backend, weight_updates."""

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
