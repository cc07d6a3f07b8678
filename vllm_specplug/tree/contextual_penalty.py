# SPDX-License-Identifier: Apache-2.0
"""TokenSwift's contextual penalty: tokens of the recent text become less likely.

Over the last W tokens of prompt and output, each distinct token's logit is divided by theta when
positive and multiplied by it otherwise, once however often it occurs (arXiv 2502.18890, section
3.4, which writes the division only). Dividing commutes with the temperature, so it does not
matter that the sampler applies the temperature afterwards.

The penalised distribution *is* the target's: plain decoding and the walk apply the same function
to the same tokens, so drafts can change nothing but speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def recent_tokens(prompt: Sequence[int], output: Sequence[int], window: int) -> list[int]:
    """Distinct tokens among the last `window` of prompt and output, ascending.

    Negative ids (vLLM's placeholders for tokens not known yet) are left out.
    """
    if window <= 0:
        return []
    missing = window - len(output)
    recent = set(output[-window:])
    if missing > 0:
        recent.update(prompt[-missing:])
    return sorted(token for token in recent if token >= 0)


def penalise(logits: torch.Tensor, token_ids: torch.Tensor, theta: float) -> None:
    """Applies the penalty to logits [..., V] in place for tokens int64 [n], each given once."""
    values = logits[..., token_ids]
    logits[..., token_ids] = torch.where(values > 0, values / theta, values * theta)
