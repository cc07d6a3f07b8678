# SPDX-License-Identifier: Apache-2.0
"""What vLLM's memory profile counts of a drafter's own memory is what is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_specplug.drafting.caches import PartialCacheSpec, TargetCacheSpec, WindowSpec
from vllm_specplug.drafting.method import Capability
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.device_self_draft import DeviceSelfDraft
from vllm_specplug.vllm_worker.memory.drafter_memory import (
    bind_drafter_memory,
    check_host_drafts,
    drafter_memory,
    memory_for_caches,
)
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.target.state_layers import StateLayers

CPU = torch.device("cpu")
HEADS, DIM, LAYERS, REQUESTS, CONTEXT = 2, 16, 3, 4, 512


class State(RunnerView):
    """A runner before and after its caches are made, in blocks of `block_size` tokens."""

    dummy_forward = trees_forward = wait_for_device = adapters = None  # type: ignore[assignment]

    def __init__(self, drafter: Any, block_size: int) -> None:
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
        )
        specs = {f"layers.{i}": spec for i in range(LAYERS)}
        super().__init__(
            SimpleNamespace(
                vllm_config=SimpleNamespace(
                    cache_config=SimpleNamespace(block_size=block_size),
                    speculative_config=SimpleNamespace(max_step_rows=None),
                ),
                drafter=SimpleNamespace(
                    drafter=drafter, options=SimpleNamespace(num_nodes=10),
                    state_layers=StateLayers(),
                ),
                max_num_reqs=REQUESTS, dtype=torch.float32, device=CPU, max_model_len=CONTEXT,
                max_num_tokens=64, get_kv_cache_spec=lambda: specs,
            )
        )  # fmt: skip
        self.block_size = block_size

    def target_caches(self) -> dict[str, torch.Tensor]:
        shape = (9, HEADS, self.block_size, 2 * DIM)
        return {name: torch.zeros(shape) for name in self.runner.get_kv_cache_spec()}

    def block_table(self, group: int = 0) -> torch.Tensor:
        return torch.zeros(REQUESTS, 9, dtype=torch.int32)


def backend_of(pages: int, monkeypatch: pytest.MonkeyPatch) -> CudaTreeBackend:
    """One whose bound caches have `pages` tokens in a page."""
    monkeypatch.setattr(CudaTreeBackend, "cache_writer", lambda self: lambda *args: None)
    backend = CudaTreeBackend("auto", HEADS, StepLimits(REQUESTS, 64, 11, CONTEXT), CPU)
    backend.block_size = pages
    return backend


# Pages of the attention that is bound may be larger than vLLM's blocks, as where layers of several
# shapes share memory, and smaller.
@pytest.mark.parametrize("pages", [16, 64, 512])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("size", [24, 32, 100])
def test_windows(size: int, block_size: int, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = WindowSpec(size, HEADS, DIM)
    drafter = SimpleNamespace(window_spec=lambda: spec, partial_cache_spec=lambda: None)
    state = State(drafter, block_size)
    counted = drafter_memory(state).nbytes
    window = backend_of(pages, monkeypatch).draft_window(spec, state)
    assert counted == sum(cache.nbytes for cache in window.kv_caches)
    # Room for every request's window, and less than a page of each beside.
    needed = REQUESTS * size * HEADS * 2 * DIM * 4
    assert needed <= counted < needed + REQUESTS * 32 * HEADS * 2 * DIM * 4


# A context never outgrows the last budget: nothing is kept but a page of each layer.
@pytest.mark.parametrize("budget", [40, 64, CONTEXT])
@pytest.mark.parametrize("block_size", [16, 64])
def test_partial_caches(budget: int, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PartialCacheSpec(budget, 4, 3, ("self_draft_requests", "kv_budget"))
    drafter = SimpleNamespace(window_spec=lambda: None, partial_cache_spec=lambda: spec)
    state = State(drafter, block_size)
    counted = drafter_memory(state).nbytes
    pool = DeviceSelfDraft(state, spec, backend_of(block_size, monkeypatch)).pool
    assert counted == sum(cache.untyped_storage().nbytes() for cache in pool.caches)
    assert pool.max_requests == (0 if budget == CONTEXT else 3)


def test_what_leaves_no_memory_for_caches_is_listed() -> None:
    window = WindowSpec(24, HEADS, DIM)
    kept = PartialCacheSpec(40, 4, 3, ("self_draft_requests", "kv_budget"))
    drafter = SimpleNamespace(window_spec=lambda: window, partial_cache_spec=lambda: kept)
    state = State(drafter, 16)
    needed = drafter_memory(state).nbytes
    assert memory_for_caches(state, needed + 7) == 7
    words = "MiB for windows of 24 tokens.*MiB for self_draft_requests=3 .* of kv_budget=40 tokens"
    with pytest.raises(ValueError, match=words):
        memory_for_caches(state, needed)


@pytest.mark.parametrize("is_declared", [False, True])
def test_caches_of_the_target_and_their_capability_go_together(is_declared: bool) -> None:
    spec = SimpleNamespace(needs=lambda: {Capability.TARGET_CACHE} if is_declared else set())
    caches = [] if is_declared else [TargetCacheSpec(1, 32, 1.0)]
    drafter = SimpleNamespace(window_spec=lambda: None, target_cache_specs=lambda: caches)
    state: Any = SimpleNamespace(
        drafter=drafter, runner=SimpleNamespace(tree_backend=None),
        vllm_config=SimpleNamespace(speculative_config=spec),
    )  # fmt: skip
    message = rf"'mine'.* names {len(caches)} caches.* 'target_cache'. Declare both, or neither"
    with pytest.raises(ValueError, match=message):
        bind_drafter_memory(state, "mine")


SPECS = ("cache_specs", "target_cache_specs", "window_spec", "partial_cache_spec")


@pytest.mark.parametrize("name", SPECS)
def test_caches_on_a_device_serve_only_drafts_that_are_built_there(name: str) -> None:
    def check(specs: list[str], is_host: bool = False, drafts_on_device: bool = False) -> None:
        made: dict[str, Any] = {**dict.fromkeys(SPECS, lambda: None), name: lambda: specs}
        state: Any = SimpleNamespace(
            drafter=SimpleNamespace(drafts_on_device=drafts_on_device, **made),
            runner=SimpleNamespace(tree_backend=SimpleNamespace(is_host=is_host)),
        )
        check_host_drafts(state, "mine")

    check([])
    check(["a cache"], is_host=True)
    check(["a cache"], drafts_on_device=True)
    with pytest.raises(ValueError, match="'mine' .* has caches, .* drafts_on_device is False"):
        check(["a cache"])
