# SPDX-License-Identifier: Apache-2.0
"""Draft LM heads that are rows of the target's."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.drafting.target_head import TargetHead
from vllm_specplug.kernels.fp8_linear import Fp8Linear
from vllm_specplug.methods.block.fused_parts import plain_linear


class OnDevice(TargetHead):
    """One whose device is the host in truth."""

    def _rows(self, lm_head: torch.Tensor) -> torch.Tensor:
        return lm_head if self.target_ids is None else lm_head[self.target_ids]


@pytest.mark.parametrize("target_ids", [None, torch.tensor([5, 0, 3])])
@pytest.mark.parametrize("on_device", [False, True])
def test_scores_are_those_of_the_new_lm_head(
    target_ids: torch.Tensor | None, on_device: bool
) -> None:
    old, new, x = torch.randn(8, 4), torch.randn(8, 4), torch.randn(3, 4)
    rows = slice(None) if target_ids is None else target_ids
    kind, device = (OnDevice, "cuda") if on_device else (TargetHead, "cpu")
    head = kind(old.clone(), target_ids, torch.device(device), torch.float32, plain_linear)
    torch.testing.assert_close(head(x), x @ old[rows].T)
    weight = head.weight
    product = head.product
    head.follow_target(new)
    torch.testing.assert_close(head(x), x @ new[rows].T)
    if on_device:
        # What a graph captured still computes with the weight where it was.
        assert head.weight is weight
        torch.testing.assert_close(product(x), x @ new[rows].T)


def test_rounded_heads_follow_in_place() -> None:
    old, new, x = (torch.randn(32, 16).bfloat16() for _ in range(3))
    head = OnDevice(old, None, torch.device("cuda"), torch.bfloat16, Fp8Linear)
    # The rows it was made of need not be kept.
    assert head.weight is None
    product = head.product
    head.follow_target(new)
    assert head.product is product
    assert torch.equal(head(x), Fp8Linear(new, None)(x))
