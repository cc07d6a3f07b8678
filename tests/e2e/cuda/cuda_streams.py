# SPDX-License-Identifier: Apache-2.0
"""The CUDA worker on a pretended device that keeps only the order of streams.

`cuda_worker` with `tests.pretended_device` entered in all that a worker does: the runner's
device is "cuda", and streams, events, pinned and mapped memory are the pretended device's. vLLM's
own functions for these, which its CPU worker replaces, stand where they stand on CUDA. Plain
engines stay as they are.

With SPECPLUG_INTERPRETED=1 to be imported before `cuda_worker` and before what uses vLLM's workers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tests.e2e.cuda.cuda_device import INTERPRETED
from tests.pretended_device import DEVICE, PretendedDevice, on_the_device_too

device = PretendedDevice()
_register = torch.library.Library.impl


def _impl(self: Any, name: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    is_python = not isinstance(function, torch._ops.OpOverload) and callable(function)
    _register(self, name, on_the_device_too(function) if is_python else function, *args, **kwargs)


if INTERPRETED:
    # Before vLLM registers operations that are written in Python.
    torch.library.Library.impl = _impl  # type: ignore[method-assign]

from vllm.utils import torch_utils  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils  # noqa: E402

# Before vLLM's CPU worker puts its own in their place.
_stock_h2d, _StockBuffer = torch_utils.async_tensor_h2d, buffer_utils.UvaBuffer
import vllm.v1.worker.cpu.shm  # noqa: E402, F401  # isort: skip

_cpu_h2d = torch_utils.async_tensor_h2d


def _async_tensor_h2d(*args: Any, **kwargs: Any) -> torch.Tensor:
    return (_stock_h2d if device.is_entered else _cpu_h2d)(*args, **kwargs)


if INTERPRETED:
    # Whoever imports it from here on gets one for both.
    torch_utils.async_tensor_h2d = buffer_utils.async_tensor_h2d = _async_tensor_h2d

from tests.e2e.cuda import cuda_worker  # noqa: E402
from vllm_specplug.engine import spec_config  # noqa: E402
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend  # noqa: E402
from vllm_specplug.vllm_worker.cost.step_clock import StepClock  # noqa: E402
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits  # noqa: E402


@contextmanager
def on_device() -> Iterator[None]:
    """What a worker does."""
    if device.is_entered:
        yield
        return
    from vllm.v1.worker.gpu import structured_outputs

    with ExitStack() as stack:
        for owner, name, new in (
            (buffer_utils, "UvaBuffer", _StockBuffer),
            (buffer_utils, "get_accelerator_view_from_cpu_tensor", device.mapped),
            (torch_utils, "is_pin_memory_available", lambda: True),
            (structured_outputs, "PIN_MEMORY", True),
            # Where vLLM's platform looks for it.
            (torch.cpu, "current_device", lambda: DEVICE),
        ):
            stack.enter_context(patch.object(owner, name, new))
        stack.enter_context(device.entered())
        yield


class StreamTreeBackend(cuda_worker.InterpretedTreeBackend):
    """With the device's own clock and kernels warmed up as on it."""

    def step_clock(self) -> StepClock:
        return CudaTreeBackend.step_clock(self)


class StreamRunner(cuda_worker.InterpretedRunner):
    """`InterpretedRunner` on the pretended device."""

    def __init__(self, vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, DEVICE, *args, **kwargs)

    def make_tree_backend(self) -> CudaTreeBackend:
        limits = StepLimits.of(self.state)
        return StreamTreeBackend("triton", self.state.num_query_heads, limits, self.device)


class StreamWorker(cuda_worker.InterpretedWorker):
    """`InterpretedWorker` on the pretended device."""

    runner_class = StreamRunner

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        with patch.object(self.vllm_config.device_config, "device", DEVICE):
            return super().load_model(*args, **kwargs)


def _entering(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with on_device():
            return method(*args, **kwargs)

    return call


for _name in (
    "init_device", "load_model", "determine_available_memory", "get_kv_cache_spec",
    "initialize_from_config", "compile_or_warm_up_model", "execute_model", "sample_tokens",
    "take_draft_token_ids", "execute_dummy_batch",
):  # fmt: skip
    setattr(StreamWorker, _name, _entering(getattr(StreamWorker, _name)))


def use_stream_worker() -> None:
    """Drafting engines that this process builds from here on run on the pretended device; after
    `use_cuda_worker`."""
    spec_config.WORKERS["cpu"] = f"{__name__}.{StreamWorker.__name__}"
