# SPDX-License-Identifier: Apache-2.0
"""The CUDA worker on a CPU: its classes and its kernels, in Triton's interpreter.

To be imported after `interpreter.install`. vLLM's Triton attention stands where it stands on
CUDA, over a cache of that layout; what a CPU lacks is replaced here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_pp_group
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import MLAAttentionImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops import triton_reshape_and_cache_flash
from vllm.v1.worker.cpu import model_runner as cpu_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.e2e.cuda.cuda_device import CAPTURED_ROWS
from vllm_specplug.engine import engine_args, spec_config
from vllm_specplug.tree import step_trees
from vllm_specplug.vllm_attention.full_graphs import wants_full_graphs
from vllm_specplug.vllm_attention.gpu import gpu_cache_views
from vllm_specplug.vllm_v2 import worker_gpu
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_v2.latent_device import LatentDeviceBackend
from vllm_specplug.vllm_v2.worker_gpu import DeviceRunnerMixin, DeviceStageMixin, TreeGPUWorker
from vllm_specplug.vllm_worker.cost.step_clock import DeviceClock, StepClock
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits


class PretendedEvent:
    """An event that the device passes two questions later."""

    def __init__(self) -> None:
        self.time = 0.0
        self.asked = 0

    def record(self) -> None:
        import time

        self.time = time.perf_counter()

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def elapsed_time(self, end: PretendedEvent) -> float:
        return 1e3 * (end.time - self.time)


class InterpretedMixin(CudaTreeBackend):
    """The mixin to put before a backend of CUDA to run it on a CPU."""

    def step_clock(self) -> StepClock:
        return DeviceClock(PretendedEvent)

    def capability(self) -> tuple[int, int]:
        return (9, 0)

    def cache_writer(self) -> Callable[..., None]:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash,
        )

        one = torch.ones((), dtype=torch.float32, device=self.device)

        def write(
            key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            key_cache, value_cache = gpu_cache_views(kv_cache)
            triton_reshape_and_cache_flash(
                key, value, key_cache, value_cache, slots, "auto", one, one
            )

        return write


class InterpretedTreeBackend(InterpretedMixin, CudaTreeBackend):
    """`CudaTreeBackend` on a CPU."""


class InterpretedLatentBackend(InterpretedMixin, LatentDeviceBackend):
    """`LatentDeviceBackend` on a CPU."""


class InterpretedStage(DeviceStageMixin, cpu_runner.CPUModelRunner):
    """`GPUStageRunner` on a CPU; with full graphs, where `pretended_graphs` is entered."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if wants_full_graphs():
            # As on CUDA; CPUs have no graphs.
            compilation = vllm_config.compilation_config
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            compilation.cudagraph_capture_sizes = CAPTURED_ROWS
            compilation.max_cudagraph_capture_size = CAPTURED_ROWS[-1]
        super().__init__(vllm_config, *args, **kwargs)

    def make_tree_backend(self) -> CudaTreeBackend:
        limits = StepLimits.of(self.state)
        is_latent = self.model_config.use_mla
        backend = InterpretedLatentBackend if is_latent else InterpretedTreeBackend
        return backend("triton", self.state.num_query_heads, limits, self.device)


class InterpretedRunner(DeviceRunnerMixin, InterpretedStage):
    """`TreeGPUModelRunner` on a CPU."""


def _interpreted_runner(*args: Any) -> InterpretedStage:
    return (InterpretedRunner if get_pp_group().is_last_rank else InterpretedStage)(*args)


class InterpretedWorker(TreeGPUWorker, CPUWorker):
    """`TreeGPUWorker` on a CPU."""

    def init_device(self) -> None:
        # A CPU build has no FlashAttention.
        with (
            patch.object(worker_gpu, "require_seams", lambda *args: None),
            patch.object(cpu_runner, "CPUModelRunner", _interpreted_runner),
        ):
            super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if wants_full_graphs():
            self.model_runner.capture_model()
        # vLLM's CPU worker does not come to it.
        self._maybe_activate_jit_monitor()
        return times


def use_cuda_worker() -> None:
    """Engines that this process builds from here on run as on CUDA, plain ones included."""
    spec_config.WORKERS["cpu"] = f"{__name__}.{InterpretedWorker.__name__}"
    step_trees.has_kernels = lambda device: True
    engine_args.SERVED_CACHES["cpu"] = engine_args.SERVED_CACHES["cuda"]
    # vLLM's cache writes look for it.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    # The interpreter knows e4m3.
    triton_reshape_and_cache_flash._is_supported_kv_cache_dtype = lambda kv_cache_dtype: True
    CpuPlatform.get_attn_backend_cls = classmethod(_chosen_backend)  # type: ignore[method-assign]
    # A CPU build lacks the operator that stores latent rows.
    MLAAttentionImpl.do_kv_cache_update = CPUMLAImpl.do_kv_cache_update  # type: ignore[method-assign]
    check = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        # Otherwise vLLM switches chunked prompts and prefix hits off for latent attention.
        with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True):
            check(vllm_config)

    CpuPlatform.check_and_update_config = classmethod(  # type: ignore[method-assign]
        check_and_update_config
    )


def _chosen_backend(cls: Any, selected: Any, attn_selector_config: Any, **kwargs: Any) -> str:
    backends = AttentionBackendEnum
    chosen = backends.TRITON_MLA if attn_selector_config.use_mla else backends.TRITON_ATTN
    return chosen.get_path()
