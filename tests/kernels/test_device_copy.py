# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies between host and device: what orders them, and that there are no others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplug.kernels import copy_to_device, to_device
from vllm_specplug.vllm_v2 import host_step

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("made", [np.arange(6).reshape(2, 3), torch.arange(6).view(2, 3)])
def test_the_hosts_own_memory_is_not_copied(made: Any) -> None:
    copy = to_device(made, torch.device("cpu"))
    made[1, 2] = 9
    assert copy.tolist() == [[0, 1, 2], [3, 4, 9]] and copy.dtype == torch.int64


def test_other_devices_get_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, bool]] = []

    def to(self: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
        asked.append((device.type, non_blocking))
        return self

    pins: list[list[int]] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pins.append(self.tolist()) or self)
    assert to_device(np.arange(2), torch.device("meta")).is_meta and not pins
    monkeypatch.setattr(torch.Tensor, "to", to)
    cuda: Any = SimpleNamespace(type="cuda")
    to_device(np.arange(3), cuda)
    assert pins == [[0, 1, 2]] and asked == [("cuda", True)]
    target = SimpleNamespace(device=cuda, copy_=lambda source, non_blocking: asked.append(
        (source.tolist(), non_blocking)
    ))  # fmt: skip
    copy_to_device(np.arange(2), target)  # type: ignore[arg-type]
    assert pins == [[0, 1, 2], [0, 1]] and asked[1:] == [([0, 1], True)]


def test_the_host_reads_a_copy_once_its_event_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def query(self) -> bool:
            return "wait" in calls

        def synchronize(self) -> None:
            calls.append("wait")

    pinned = SimpleNamespace(
        copy_=lambda source, non_blocking: calls.append((source, non_blocking)),
        numpy=lambda: calls.append("read") or np.arange(3),
    )
    on_host: list[bool] = []

    def empty(shape: Any, dtype: Any, pin_memory: bool) -> Any:
        on_host.append(pin_memory)
        return pinned

    torch_of_cuda = SimpleNamespace(empty=empty, cuda=SimpleNamespace(Event=Event))
    monkeypatch.setattr(host_step, "torch", torch_of_cuda)
    tensor: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=(3,), dtype=None)
    copy = host_step.HostCopy(tensor)
    assert on_host == [True] and calls == [(tensor, True), "record"] and not copy.has_arrived
    assert copy.read().tolist() == [0, 1, 2] and calls[2:] == ["wait", "read"]
    assert copy.has_arrived


def test_no_other_code_copies_asynchronously_or_uses_streams() -> None:
    """Nothing else could race with what a device does: all else is done in the order of one stream.
    Only the timing of kernels captures on another, and pipeline stages broadcast on vLLM's."""
    sources = [*(ROOT / "vllm_specplug").rglob("*.py"), *(ROOT / "kernels/src").rglob("*.py")]
    found = {
        word: {path.name for path in sources if word in path.read_text()}
        for word in (
            "non_blocking",
            "pin_memory",
            "UvaBackedTensor",
            "cuda.Stream",
            "torch.Stream",
            "wait_stream",
            "record_stream",
            "cuda.Event(",
        )  # fmt: skip
    }
    copies = {"device_copy.py", "host_step.py"}
    assert found == {
        "non_blocking": copies, "pin_memory": copies, "UvaBackedTensor": {"penalty_processor.py"},
        "cuda.Stream": {"cuda_dispatch.py"}, "torch.Stream": set(),
        "wait_stream": {"stage_relay.py"}, "record_stream": {"stage_relay.py"},
        "cuda.Event(": {"host_step.py", "cuda_trees.py", "step_clock.py"},
    }  # fmt: skip
