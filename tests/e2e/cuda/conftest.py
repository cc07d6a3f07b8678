# SPDX-License-Identifier: Apache-2.0
"""Where engines run as on CUDA: for tests in a process of their own."""

from __future__ import annotations

from importlib.util import find_spec

# Before vLLM: it puts Triton's interpreter in place.
from tests.e2e.cuda import cuda_device  # isort: skip

import pytest

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def cuda_worker() -> None:
    cuda_device.use_worker()


@pytest.fixture(scope="session")
def device_states() -> None:
    from tests.e2e.cuda.cuda_states import use_device_core

    use_device_core()


@pytest.fixture(scope="session")
def device_axes() -> None:
    """vLLM's kernel for rotary positions on several axes is interpreted."""
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    MRotaryEmbedding.forward_cpu = MRotaryEmbedding.forward_cuda
