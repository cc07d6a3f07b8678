# SPDX-License-Identifier: Apache-2.0
"""What a head computed is finite where it is stored; see `make_finite`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplug.drafting.caches import WindowSpec
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.memory.device_draft_cache import CudaDraftCache
from vllm_specplug.vllm_worker.memory.device_window import DeviceWindowCache
from vllm_specplug.vllm_worker.memory.draft_cache import PagedDraftCache
from vllm_specplug.vllm_worker.memory.window_cache import WindowCache

HEADS, DIM, PAGE, LAYERS, TOKENS = 2, 32, 32, 2, 3
WINDOW = WindowSpec(PAGE, HEADS, DIM)


def layers(dtype: torch.dtype) -> Any:
    return [
        SimpleNamespace(
            kv_cache=torch.zeros(2, HEADS, PAGE, 2 * DIM, dtype=dtype),
            spec=SimpleNamespace(window=None),
        )
        for _ in range(LAYERS)
    ]


def device() -> CudaTreeBackend:
    return CudaTreeBackend("auto", HEADS, StepLimits(1, 8, 5, 64), torch.device("cpu"))


def table() -> torch.Tensor:
    return torch.zeros(1, 1, dtype=torch.int32)


MAKERS: dict[str, Callable[[torch.dtype], Any]] = {
    "pages": lambda dtype: PagedDraftCache(layers(dtype), table, 1.0),
    "window": lambda dtype: WindowCache(WINDOW, 1, dtype),
    "device_pages": lambda dtype: CudaDraftCache(device(), layers(dtype), table, 1.0),
    "device_window": lambda dtype: DeviceWindowCache(device(), WINDOW, 1, dtype),
}


def store(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: Any) -> None:
    """As a device's store."""
    at = slots // PAGE, slice(None), slots % PAGE
    kv_cache[at] = torch.cat((key, value), -1)


def stored(cache: Any) -> list[torch.Tensor]:
    if isinstance(cache, PagedDraftCache):
        pairs = cache.caches
    else:
        pairs = [cache.views] if isinstance(cache, WindowCache) else cache.views
    return [part for pair in pairs for part in pair]


@pytest.mark.usefixtures("vllm_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAKERS)
def test_keys_and_values_of_a_head_are_finite_where_they_are_stored(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaTreeBackend, "cache_writer", lambda self: store)
    cache = MAKERS[name](dtype)
    # As heads hand them over: parts of a joint projection.
    joint = torch.ones(TOKENS, 2, LAYERS, HEADS, DIM, dtype=dtype)
    keys, values = joint.transpose(1, 2).transpose(0, 1).unbind(2)
    values[1, 0, 1, 3], values[0, 2] = float("inf"), float("-inf")
    keys[0, 1, 0, 7], values[1, 1, 1] = float("nan"), float("nan")
    if "window" in name:
        keys, values = keys[0], values[0]
    written = int(keys.isfinite().sum() + values.isfinite().sum())
    cache.write(keys, values, torch.tensor([4, 0, 9]))
    kept = stored(cache)
    assert all(part.isfinite().all() for part in kept)
    assert sum(int(part.count_nonzero()) for part in kept) == written
