# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA worker with the tree runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.seams.listing_runner import DEVICE_SPECULATOR, TREE_GRAPHS
from vllm_specplug.vllm_attention.device_states import warmup
from vllm_specplug.vllm_attention.full_graphs import wants_full_graphs
from vllm_specplug.vllm_v2.backend import TreeBackend
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_v2.device_speculator import DeviceSpeculator
from vllm_specplug.vllm_v2.runner import TreeRunnerMixin
from vllm_specplug.vllm_v2.stage import StageRunnerMixin
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.memory.drafter_memory import drafter_memory, max_tree_rows
from vllm_specplug.vllm_worker.start_up import require_seams
from vllm_specplug.vllm_worker.target.attention_backend import claim_attention_backend
from vllm_specplug.vllm_worker.target.weight_updates import FollowsTarget
from vllm_specplug.vllm_worker.warmup import profile_largest_step, warm_up_draft


class DeviceStageMixin(StageRunnerMixin):
    """Verifies trees in one pipeline stage on a GPU.

    `DeviceRunnerMixin` extends it for the last stage.
    """

    tree_backend: CudaTreeBackend

    def make_tree_backend(self) -> TreeBackend:
        return self.backend_class()(
            self.tree_spec.tree_kernel,
            self.state.num_query_heads,
            StepLimits.of(self.state),
            self.device,
            self.vllm_config,
        )

    def backend_class(self) -> type[CudaTreeBackend]:
        """Returns the class of the backend for the target's attention."""
        if not self.model_config.use_mla:
            return CudaTreeBackend
        from vllm_specplug.vllm_v2.latent_device import LatentDeviceBackend

        return LatentDeviceBackend

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        if not wants_full_graphs(self.vllm_config):
            super().initialize_kv_cache(*args, **kwargs)
            return
        if self.drafter.state_layers.names:
            raise ValueError(
                f"{FULL_GRAPHS_VARIABLE}=1, legal: 0 or unset for targets with recurrent states, "
                "whose trees no graph holds; unset it"
            )
        with TREE_GRAPHS.applied():
            super().initialize_kv_cache(*args, **kwargs)

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        # For forwards with trees: stock attention allocates no such memory in a profile run.
        workspace = self.tree_backend.make_workspace()
        kept = self._tree_state_memory()
        super().profile_run(*args, **kwargs)
        del workspace, kept

    def warm_up(self) -> None:
        """Compiles the kernels that steps use. Call it before graphs are captured."""
        self.tree_backend.warm_up()
        self._warm_up_states()

    def _warm_up_states(self) -> None:
        """Compiles the tree kernels of layers with a recurrent state."""
        names = {*self.state.state_layers.names}
        for group in self.kv_cache_config.kv_cache_groups:
            name = next((name for name in group.layer_names if name in names), None)
            if name is not None:
                warmup(self.state.layers[name], self.num_speculative_steps + 1, self.state.dtype)

    def _tree_state_memory(self) -> torch.Tensor:
        """Allocates what trees take in layers with a recurrent state: the bytes that all layers
        keep until the walk, and the temporary ones of one layer."""
        layers, rows = self.state.state_layers, max_tree_rows(self.state)
        size = 0
        if layers.names:
            # Convolved rows, values and outputs, and decays between rows of a tree.
            heads = layers.value_heads * (self.num_speculative_steps + 1)
            one = 3 * layers.row_bytes // len(layers.names) + 4 * heads
            size = rows * (layers.row_bytes + one)
        return torch.empty(size, dtype=torch.uint8, device=self.device)


class DeviceRunnerMixin(TreeRunnerMixin, DeviceStageMixin):
    """The mixin to put before a V2 runner on a GPU in the last pipeline stage."""

    speculator: DeviceSpeculator

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        # Drafters allocate this memory after the KV cache, for the engine's lifetime.
        drafters = drafter_memory(self.state)
        super().profile_run(*args, **kwargs)
        profile_largest_step(self.state, self.planner.row_budget.max_step_rows, _sample_all)
        del drafters
        self.state.wait_for_device()

    def warm_up(self) -> None:
        super().warm_up()
        self.speculator.warm_up()

    def start_budget(self) -> None:
        """Also runs each draft once, which compiles its kernels."""
        warm_up_draft(self.state)
        super().start_budget()


def _sample_all(logits: torch.Tensor) -> None:
    """Allocates as much as V2's sampler does for logits [rows, V]: a float32 copy, then sorted for
    top-k and top-p."""
    rows, vocab_size = logits.shape
    top_k = torch.full((rows,), vocab_size - 1, dtype=torch.int32, device=logits.device)
    top_p = torch.full((rows,), 0.9, device=logits.device)
    apply_top_k_top_p(logits.to(torch.float32, copy=True), top_k, top_p)


class GPUStageRunner(DeviceStageMixin, GPUModelRunner):
    """vLLM's V2 CUDA runner, verifying trees in an earlier pipeline stage."""


class TreeGPUModelRunner(DeviceRunnerMixin, GPUModelRunner):  # type: ignore[misc]  # overrides
    """vLLM's V2 CUDA runner, drafting and verifying trees."""


class TreeGPUWorker(FollowsTarget, Worker):
    """vLLM's CUDA worker. Seams: gpu_worker, device_speculator, weight_updates."""

    device: Any
    model_runner: Any  # built by `_make_model_runner`

    def init_device(self) -> None:
        require_seams("cuda", self.use_v2_model_runner)
        claim_attention_backend(self.vllm_config)
        with DEVICE_SPECULATOR.applied():
            super().init_device()

    def _make_model_runner(self) -> GPUStageRunner | TreeGPUModelRunner:
        runner = TreeGPUModelRunner if get_pp_group().is_last_rank else GPUStageRunner
        return runner(self.vllm_config, self.device)

    def synchronize_device(self) -> None:
        # Every pause ends with this call. After it, new requests may read any cached block.
        self.model_runner.settle()
        super().synchronize_device()

    def compile_or_warm_up_model(self) -> Any:
        # Before graphs are captured: a kernel that compiles during a capture would break it.
        self.model_runner.warm_up()
        return super().compile_or_warm_up_model()

    def _maybe_activate_jit_monitor(self) -> None:
        # Graphs are captured and generators are seeded for requests. From here on vLLM reports, or
        # refuses, every kernel that still compiles.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self.model_runner.start_budget()
        super()._maybe_activate_jit_monitor()
