# SPDX-License-Identifier: Apache-2.0
"""The target's LM head for draft heads that have none of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.kernels.fp8_linear import Fp8Linear


class TargetHead:
    """An LM head over a draft vocabulary, [T, H] -> [T, V'], from rows of the target's LM head.

    Args:
        lm_head: [V, H] of the target.
        target_ids: int64 [V'], the target token of each draft id; None for the full vocabulary.
        device: device of the scores.
        dtype: dtype of the scores.
        make_linear: `TargetWeights.make_linear`.
    """

    def __init__(
        self,
        lm_head: torch.Tensor,
        target_ids: torch.Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        make_linear: Callable[[torch.Tensor, None], Callable[[torch.Tensor], torch.Tensor]],
    ) -> None:
        self.target_ids, self.device, self.dtype = target_ids, device, dtype
        self.make_linear = make_linear
        rows = self._rows(lm_head)
        self.product = make_linear(rows, None)
        # Packed products hold their own copy, so the rows need not be kept.
        is_packed = device.type == "cpu" or isinstance(self.product, Fp8Linear)
        self.weight = None if is_packed else rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)

    def _rows(self, lm_head: torch.Tensor) -> torch.Tensor:
        if self.target_ids is not None:
            lm_head = lm_head[self.target_ids.to(lm_head.device)]
        return lm_head.to(device=self.device, dtype=self.dtype).contiguous()

    def follow_target(self, lm_head: torch.Tensor) -> None:
        """Updates the head from an LM head [V, H] whose values have changed."""
        rows = self._rows(lm_head)
        if isinstance(self.product, Fp8Linear):
            self.product.refill(rows)
        elif self.weight is None:
            self.product = self.make_linear(rows, None)
        else:
            # In place, because CUDA graphs read the memory that the weight had at their capture.
            self.weight.copy_(rows)
