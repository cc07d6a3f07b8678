# SPDX-License-Identifier: Apache-2.0
"""Copies from the host to a device that nothing waits for.

A copy from pageable memory would wait for all that was launched. The allocator keeps pinned memory
until copies of it are done, so the host need not.
"""

from __future__ import annotations

import numpy as np
import torch


def pinned(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values of the host where a copy to `device` need not be waited for; on the host's own device
    the very same memory."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values of the host on `device`, without waiting for it; on the host's own device the very
    same memory."""
    tensor = pinned(values, device)
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
