# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's contextual penalty, which makes tokens of the recent text less likely.

The logit of each distinct token among the last W tokens of prompt and output is divided by theta if
positive and multiplied by it otherwise, once however often the token occurs (arXiv 2502.18890,
section 3.4, which gives only the division). Scaling commutes with the temperature, so the sampler
may apply the temperature afterwards.

The penalised distribution is the target's distribution: plain decoding and tree verification apply
the same function to the same tokens, so drafts do not change the output.
"""

from __future__ import annotations

import torch


def penalise(
    # [n, D, V], changed in place
    logits: torch.Tensor,
    # [n, W] int64 recent tokens, in any order and number; ids outside 0, ..., V - 1 are ignored
    token_ids: torch.Tensor,
    # [n] float32
    thetas: torch.Tensor,
) -> None:
    """Applies the penalty without reading the device."""
    is_recent = (token_ids >= 0) & (token_ids < logits.shape[-1])
    # Entries without a token write to token 0, with the same value as token 0's own entry.
    tokens = torch.where(is_recent, token_ids, 0)
    is_recent |= (is_recent & (tokens == 0)).any(1, keepdim=True)
    theta = torch.where(is_recent, thetas[:, None], 1.0)[:, None]
    tokens = tokens[:, None].expand(-1, logits.shape[1], -1)
    before = logits.gather(2, tokens)
    after = torch.where(before > 0, before / theta, before * theta)
    logits.scatter_(2, tokens, after.to(logits.dtype))
