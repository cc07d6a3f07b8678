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

from collections import Counter
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


# Most tokens that can be replaced between two calls: those of one step.
_REPLACED = 512


class RecentTokens:
    """Which tokens lie among the last `window` of a prompt and an output that grows.

    Equal to `recent_tokens`, but a call costs what changed since the last one, whatever the window.

    Args:
        output: a live list. Between two calls tokens of one step may be taken back, or replaced.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int], window: int) -> None:
        self.window = window
        self.output = output
        # What was seen of the text: the prompt's end and the output.
        self._text = list(prompt[-window:]) if window > 0 else []
        self._num_prompt = len(self._text)
        # The counted part of it, and its tokens.
        self._begin = self._end = 0
        self._counts: dict[int, int] = {}
        # Tokens added or removed since the mask was last updated.
        self._touched: set[int] = set()
        self._mask: torch.Tensor | None = None

    def mask(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """bool [V], true for the recent tokens; valid until the next call."""
        if self._mask is None:
            self._mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        return self._marked(self._mask)

    def token_ids(self) -> torch.Tensor:
        """The recent tokens that have a logit, int64 [n]; none before the first `mask`."""
        if self._mask is None:
            return torch.empty(0, dtype=torch.int64)
        return self._marked(self._mask).nonzero()[:, 0]

    def _marked(self, mask: torch.Tensor) -> torch.Tensor:
        self._follow()
        # A tokenizer may know more tokens than the model has logits.
        touched = sorted(token for token in self._touched if 0 <= token < len(mask))
        self._touched.clear()
        if touched:
            present = [token in self._counts for token in touched]
            index = torch.tensor(touched, device=mask.device)
            mask[index] = torch.tensor(present, device=mask.device)
        return mask

    def _follow(self) -> None:
        text, first, output = self._text, self._num_prompt, self.output
        seen = len(text) - first
        same = min(seen, len(output))
        last = max(0, same - _REPLACED)
        if text[first + last : first + same] != list(output[last:same]):
            same = next(i for i in range(same) if text[first + i] != output[i])
        if same < seen:
            end = first + same
            self._count(max(end, self._begin), self._end, -1)
            del text[end:]
            self._begin, self._end = min(self._begin, end), end
        text.extend(output[same:])
        begin, end = max(0, len(text) - self.window), len(text)
        self._count(self._begin, min(begin, self._end), -1)
        self._count(begin, min(self._begin, end), 1)
        self._count(max(begin, self._end), end, 1)
        self._begin, self._end = begin, end

    def _count(self, begin: int, end: int, change: int) -> None:
        counts = self._counts
        tokens = self._text[begin:end] if begin < end else []
        self._touched.update(tokens)
        if not counts:  # a new window: at the speed of C
            counts.update(Counter(tokens))
            return
        for token in tokens:
            count = counts.get(token, 0) + change
            if count:
                counts[token] = count
            else:
                del counts[token]


def penalise_where(logits: torch.Tensor, mask: torch.Tensor, theta: float) -> None:
    """Applies the penalty to logits [V] in place where mask [V] is true."""
    changed = torch.where(logits > 0, logits / theta, logits * theta)
    logits.copy_(torch.where(mask, changed, logits))


def penalise(logits: torch.Tensor, token_ids: torch.Tensor, theta: float) -> None:
    """Applies the penalty to logits [..., V] in place for tokens int64 [n], each given once."""
    values = logits[..., token_ids]
    logits[..., token_ids] = torch.where(values > 0, values / theta, values * theta)
