# SPDX-License-Identifier: Apache-2.0
"""What packed weights look like."""

from __future__ import annotations

import torch


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a layer's weight is what `pack_linear` makes: compressed, or in panels."""
    return weight.dtype == torch.uint8 or weight.dim() == 3
