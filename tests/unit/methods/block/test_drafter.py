# SPDX-License-Identifier: Apache-2.0
"""Drafting on a device must not wait for it: one wait would cost what the launches hide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.e2e.tiny import HIDDEN, make_head
from tests.unit.drafters import load_drafter
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.methods.block.drafter import BlockHeadDrafter

VOCAB = 20
# Stands for a GPU: it holds no values, so that a copy back to the host raises.
DEVICE = torch.device("meta")


class _Cache:
    def write(self, *args: Any) -> None: ...

    def block_attention(self, requests: DraftRequests, rows: int, causal: bool) -> Any:
        return lambda layer, query, key, value: torch.empty_like(query)


class _Copies(TorchDispatchMode):
    """Copies from the host to the device, and whether each waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device != DEVICE:
            self.waits.append(not kwargs.get("non_blocking"))
        return func(*args, **kwargs)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@pytest.mark.usefixtures("pinned")
def test_a_step_of_drafting_never_waits_for_the_device(tmp_path: Path) -> None:
    table = torch.empty(VOCAB, HIDDEN, device=DEVICE)
    head = make_head(tmp_path / "head", VOCAB)
    drafter = load_drafter(BlockHeadDrafter, head, None, table)
    drafter.bind_cache(_Cache())
    requests = DraftRequests(
        token_ids=[np.array([1, 2, 3]), np.array([4])], context_lens=[2, 0], req_indices=[0, 1],
        req_ids=["a", "b"], budgets=[12, 5], widths=[4, 4], depths=[4, 1],
    )  # fmt: skip
    layers = len(drafter.config.target_layer_ids)
    rows = torch.empty(3, dtype=torch.int64, device=DEVICE)
    with _Copies() as copies:
        drafter.observe(
            CommittedTokens([torch.empty(5, HIDDEN, device=DEVICE)] * layers, rows, rows, rows)
        )
        ids, log_probs = drafter.candidates(requests, 4, 4)
    assert ids.shape == log_probs.shape == (2, 4, 4) and ids.device == DEVICE
    assert copies.waits == [False]


@pytest.mark.usefixtures("pinned")
def test_a_copy_that_waits_is_noticed() -> None:
    with _Copies() as copies:
        torch.tensor([1]).to(DEVICE)
        device_tensor([1], DEVICE)
    assert copies.waits == [True, False]
    with pytest.raises(NotImplementedError):
        torch.empty(2, device=DEVICE).cpu()


def test_integers_arrive_as_they_are() -> None:
    assert device_tensor([[3, 1], [2, 5]], torch.device("cpu")).tolist() == [[3, 1], [2, 5]]
    assert device_tensor([], torch.device("cpu")).dtype == torch.int64
