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

from collections.abc import Sequence

import torch


def recent_tokens(prompt: Sequence[int], output: Sequence[int], window: int) -> list[int]:
    """Returns the distinct tokens among the last `window` of prompt and output, ascending.

    Negative ids (vLLM's placeholders for unknown tokens) are left out.
    """
    if window <= 0:
        return []
    missing = window - len(output)
    recent = set(output[-window:])
    if missing > 0:
        recent.update(prompt[-missing:])
    return sorted(token for token in recent if token >= 0)


def penalise(logits: torch.Tensor, token_ids: torch.Tensor, theta: float) -> None:
    """Applies the penalty to logits [..., V] in place, for distinct tokens int64 [n]."""
    values = logits[..., token_ids]
    logits[..., token_ids] = torch.where(values > 0, values / theta, values * theta)
