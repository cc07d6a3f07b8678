# SPDX-License-Identifier: Apache-2.0
"""The exact joint distribution of a tiny target's first three tokens, and tests against it.

The first token comes from the prompt, the next two out of trees. With eight tokens there are 512
joint outcomes, so a rule that prefers what was drafted shows in cells of its own: nothing is
averaged over what came before.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from scipy import stats

VOCAB = 8
PROMPT = [3, 7, 5, 3, 6, 5, 3]
SAMPLES = 12_000
# An honest engine fails one comparison in ten thousand, over all that are made here a run in about
# a thousand; and runs repeat, their seed is fixed.
LEVEL = 1e-4
# Rejections that the negative control turns into acceptance of the first child.
BIAS = 0.05
# Cells that expect fewer samples are counted together.
_MIN_EXPECTED = 5.0


def truncated(p: np.ndarray, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """`p` [..., V] as top-k and top-p sampling leave it."""
    order = np.argsort(-p, axis=-1)
    ranked = np.take_along_axis(p, order, axis=-1)
    before = np.cumsum(ranked, axis=-1) - ranked
    kept = before < top_p
    if top_k:
        kept[..., top_k:] = False
    result = np.zeros_like(p)
    np.put_along_axis(result, order, np.where(kept, ranked, 0.0), axis=-1)
    return result / result.sum(-1, keepdims=True)


class TinyJoint:
    """Conditional distributions of the first three tokens after PROMPT, by transformers."""

    def __init__(self, target: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

        @torch.no_grad()
        def next_token(prefixes: list[list[int]]) -> np.ndarray:
            return model(torch.tensor(prefixes)).logits[:, -1].double().softmax(-1).numpy()

        tokens = range(VOCAB)
        self.first = next_token([PROMPT])[0]
        self.second = next_token([[*PROMPT, a] for a in tokens])
        third = next_token([[*PROMPT, a, b] for a in tokens for b in tokens])
        self.third = third.reshape(VOCAB, VOCAB, VOCAB)

    def joint(self, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
        """p(first, second, third), [V, V, V]."""
        parts = [truncated(p, top_k, top_p) for p in (self.first, self.second, self.third)]
        return np.einsum("a,ab,abc->abc", *parts)

    def biased(self, rate: float, children: int, rng: np.random.Generator) -> np.ndarray:
        """The joint where a share `rate` of rejections becomes the first of some children."""

        def moved(p: np.ndarray) -> np.ndarray:
            drafted = rng.permutation(VOCAB)[:children]
            result = p * (1 - rate)
            result[drafted] = p[drafted]
            result[drafted[0]] += 1.0 - result.sum()
            return result

        second = np.array([moved(p) for p in self.second])
        third = np.array([[moved(p) for p in row] for row in self.third])
        return np.einsum("a,ab,abc->abc", self.first, second, third)


def _cells(expected: np.ndarray, observed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both without cells that cannot occur, the rare ones counted together."""
    possible = expected > 0
    assert not observed[~possible].any(), "a token was sampled that the target excludes"
    expected, observed = expected[possible], observed[possible]
    rare = expected < _MIN_EXPECTED
    if not rare.any():
        return expected, observed
    return (
        np.append(expected[~rare], expected[rare].sum()),
        np.append(observed[~rare], observed[rare].sum()),
    )


def p_value(token_ids: list[list[int]], joint: np.ndarray) -> float:
    """Chi-square of the first three tokens of every sample against `joint`."""
    counts = Counter(tuple(ids[:3]) for ids in token_ids)
    observed = np.array([counts[cell] for cell in np.ndindex(joint.shape)], float)
    expected, observed = _cells(joint.ravel() * len(token_ids), observed)
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


def power(joint: np.ndarray, other: np.ndarray, samples: int) -> float:
    """Probability that `samples` of `other` fail the test against `joint`."""
    expected, shifted = _cells(joint.ravel() * samples, other.ravel() * samples)
    freedom = len(expected) - 1
    distance = float(((shifted - expected) ** 2 / expected).sum())
    return float(stats.ncx2.sf(stats.chi2.isf(LEVEL, freedom), freedom, distance))
