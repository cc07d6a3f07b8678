# SPDX-License-Identifier: Apache-2.0
"""The CUDA worker: vLLM's, with the tree runner.

`compat.spec_config` refuses CUDA until a tree attention backend for it is registered; the
worker and runner are the same mixin as on CPU.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_specplug.runtime.runner import TreeRunnerMixin


class TreeGPUModelRunner(TreeRunnerMixin, GPUModelRunner):
    """vLLM's V1 CUDA runner, verifying trees."""


class TreeGPUWorker(Worker):
    """vLLM's CUDA worker. Ledger: gpu_runner."""

    def _make_model_runner(self) -> TreeGPUModelRunner:
        return TreeGPUModelRunner(self.vllm_config, self.device)
