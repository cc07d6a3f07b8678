# SPDX-License-Identifier: Apache-2.0
"""Attention metadata that computes its own attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class DraftAttention(ABC):
    """Replaces vLLM's attention metadata in a draft forward of the target itself."""

    @abstractmethod
    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """One layer: query [R, Hq, Dh], key and value [R, Hkv, Dh] -> output [R, Hq, Dh]."""
