# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens of many rows of logits, with noise keyed by seed and position."""

from __future__ import annotations

import torch

from .extension import has_cpu_extension

UNDECIDED = -1


def gumbel_argmax(
    # [L, V] float32
    logits: torch.Tensor,
    # [L] float32 divisors of the logits; 0 skips a row
    divisors: torch.Tensor,
    # [L] int64
    seeds: torch.Tensor,
    # [L] int64
    positions: torch.Tensor,
    # [L] int64
    winners: torch.Tensor,
) -> None:
    """Writes each row's token with the largest sum of logit and Gumbel noise to `winners`.

    It is UNDECIDED if rounding decides between two tokens, if a logit is NaN, and always without
    compiled kernels. The noise is -log(-log(1 - u)) of a 32-bit
    MurmurHash3 of (seed, position, token).
    """
    if has_cpu_extension():
        # vLLM pads vocabularies to multiples of 64: rows without the padding are not contiguous.
        dense = logits.contiguous()
        torch.ops.specplug.gumbel_argmax.default(dense, divisors, seeds, positions, winners)
    else:
        winners.masked_fill_(divisors != 0, UNDECIDED)
