# SPDX-License-Identifier: Apache-2.0
"""Copies to a device: from pinned memory, in one place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplug.kernels import pinned, to_device

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
    assert pinned(torch.arange(2), cuda).tolist() == [0, 1] and len(pins) == 2


def test_memory_is_pinned_nowhere_else() -> None:
    sources = [*(ROOT / "vllm_specplug").rglob("*.py"), *(ROOT / "kernels/src").rglob("*.py")]
    found = [path.name for path in sources if ".pin_memory()" in path.read_text()]
    assert found == ["device_copy.py"]
