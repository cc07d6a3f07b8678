# SPDX-License-Identifier: Apache-2.0
"""Which layers' weights are packed."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def is_packed(layer: Any) -> bool:
    """Whether a layer's products are those of `packing_dispatch`, over a weight that is packed."""
    if not inspect.isfunction(layer.cpu_linear):
        return False
    held = inspect.getclosurevars(layer.cpu_linear).nonlocals
    if "packed_once" in held:
        return held["packed_once"].cache_info().currsize > 0
    packed = held.get("packed")
    # Compressed, or in panels.
    return packed is not None and (packed.dtype == torch.uint8 or packed.dim() == 3)
