# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's memory pools a draft head is in, and so what sleep leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.vllm_worker import proposer
from vllm_specplug.vllm_worker.target import weight_updates


class Pools:
    """vLLM's allocator, with a pool's tag for each drafter that was loaded in it."""

    def __init__(self) -> None:
        self.tags = ["none"]
        self.kept: tuple[str, ...] = ()

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        self.tags.append(tag)
        yield
        self.tags.pop()

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        self.kept = offload_tags


class Head:
    """A drafter that notes in which pool it is loaded."""

    reads_target_weights = False

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.tag = ""

    def load(self, target: TargetWeights) -> None:
        self.tag = self.pools.tags[-1]

    def cache_specs(self) -> list[Any]:
        return []


def _proposer(head: Head, monkeypatch: pytest.MonkeyPatch, **model: Any) -> Any:
    for name in ("prepare_state_layers", "check_target_layers", "_check_forward", "draft_linear"):
        monkeypatch.setattr(proposer, name, lambda *args, **kwargs: None)
    only = SimpleNamespace(world_size=1, is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(proposer, "get_pp_group", lambda: only)
    made = object.__new__(proposer.DrafterHost)
    made.drafter, made.tables = head, None  # type: ignore[assignment]
    made.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=False, dtype=torch.float32, hf_text_config=None, **model
        ),
        speculative_config=SimpleNamespace(plugin_method="test", draft_weights="full"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        device_config=SimpleNamespace(device="cpu"),
    )
    return made


@pytest.mark.parametrize("level", [1, 2])
def test_a_head_outlives_sleep(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads models in the pool of the weights, and at level 2 keeps nothing of it."""
    pools = Pools()
    head = Head(pools)
    monkeypatch.setattr(
        weight_updates.current_platform, "is_cuda_alike", lambda: True, raising=False
    )
    monkeypatch.setattr(weight_updates, "get_mem_allocator_instance", lambda: pools)
    monkeypatch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: pools)
    with pools.use_memory_pool("weights"):
        _proposer(head, monkeypatch, enable_cumem_allocator=True).load_model(torch.nn.Module())
    CuMemBackend().suspend(level)
    assert head.tag in pools.kept, (head.tag, pools.kept)


@pytest.mark.parametrize(("is_cuda", "enabled"), [(False, False), (False, True), (True, False)])
def test_where_there_is_no_sleep_there_is_no_pool(
    is_cuda: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        weight_updates.current_platform, "is_cuda_alike", lambda: is_cuda, raising=False
    )
    head = Head(Pools())
    _proposer(head, monkeypatch, enable_cumem_allocator=enabled).load_model(torch.nn.Module())
    assert head.tag == "none"
