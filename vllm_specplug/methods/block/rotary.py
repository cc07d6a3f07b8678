# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of draft heads: the kinds whose angles do not depend on the length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import is_positive

# For a layer whose config states none.
DEFAULT_MAX_POSITIONS = 2048
# "longrope", and "dynamic" as published, change all angles when a sequence grows, also the angles
# of cached keys. vLLM's "dynamic" has constant angles: `layer_config.read_rotary`.
KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rotary:
    """A head's rotary embedding.

    `scaling` holds the settings of a kind other than "default" under their published names.
    "proportional" rotates the first pairs of a whole head, a `partial_rotary_factor` of them.
    `rotated` is the number of leading dimensions of a head that are rotated; the rest pass through.
    """

    theta: float
    head_dim: int
    rotated: int
    kind: str = "default"
    scaling: Mapping[str, Any] | None = None
    max_positions: int = 0

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """Returns the angles per position float32 [rotated / 2], and the factor on cosines and
        sines.

        Raises:
            ValueError: for settings that give no finite numbers.
        """
        frequencies, factor = self._frequencies()
        if len(frequencies) != self.rotated // 2 or not torch.isfinite(frequencies).all():
            raise ValueError("frequencies that are not finite")
        if not math.isfinite(factor) or factor <= 0:
            raise ValueError(f"an attention factor of {factor}")
        return frequencies, factor

    def _frequencies(self) -> tuple[torch.Tensor, float]:
        # On the CPU, even while a module is built on the meta device.
        pairs = torch.arange(0, self.rotated, 2, dtype=torch.float32, device="cpu")
        plain = self.theta ** -(pairs / self.rotated)
        if self.kind == "default":
            return plain, 1.0
        if self.kind == "proportional":
            turning = int((self.scaling or {})["partial_rotary_factor"] * self.rotated // 2)
            return plain * (torch.arange(len(plain), device="cpu") < turning), 1.0
        stretch = (self.scaling or {}).get("factor")
        if not is_positive(stretch):
            raise ValueError(f"factor {stretch!r} is no positive number")
        return self._scaled()

    def check(self) -> None:
        """Raises ValueError, naming the config's field, for settings without finite angles."""
        try:
            self.frequencies()
        except Exception as error:
            # transformers may raise anything for wrong settings.
            problem = (
                f"{ {**(self.scaling or {}), 'rope_type': self.kind, 'rope_theta': self.theta} }"[
                    :200
                ]
            )
            raise ValueError(
                f"draft head config: rope_scaling = {problem}, legal: complete settings of its "
                f"kind ({type(error).__name__}: {str(error)[:100]}); correct the head's "
                "config.json or use another head"
            ) from None

    def _scaled(self) -> tuple[torch.Tensor, float]:
        """Computes them with transformers, whose classes the trainers use."""
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        source = LlamaConfig(
            hidden_size=self.head_dim,
            num_attention_heads=1,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions or DEFAULT_MAX_POSITIONS,
            rope_parameters={
                **(self.scaling or {}),
                "rope_type": self.kind,
                "rope_theta": self.theta,
                "partial_rotary_factor": self.rotated / self.head_dim,
            },
        )
        # Some of these functions follow the default device, which may be the meta device.
        with torch.device("cpu"):
            frequencies, factor = ROPE_INIT_FUNCTIONS[self.kind](source, torch.device("cpu"))
        return frequencies.float(), float(factor)
