# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies from the host to a device.

A copy from pageable memory would wait for all launched work. The allocator keeps pinned memory
until its copies are done: each copy pins memory of its own, which is not written again.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns host values on `device`, copied asynchronously; the same memory if `device` is the
    host."""
    tensor = _pinned(values, device)
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def copy_to_device(values: np.ndarray | torch.Tensor, target: torch.Tensor) -> None:
    """Copies host values into `target` asynchronously."""
    target.copy_(_pinned(values, target.device), non_blocking=True)


def _pinned(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns host values in memory that can be copied to `device` asynchronously; the same memory
    if `device` is the host."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return tensor.pin_memory() if device.type == "cuda" else tensor
