# SPDX-License-Identifier: Apache-2.0
"""bfloat16 targets with recurrent states and vLLM's own kernels.

Tokens are compared until the two best are so close that rounding decides, scores until then.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.families import WINDOW_PROMPTS
from tests.e2e.hybrids import make_hybrid_target
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import generate, pair, sequences_of
from tests.e2e.requests import greedy

pytestmark = [pytest.mark.e2e, pytest.mark.own_process, pytest.mark.full]

# Of natural logarithms, between scores of one token; twice that between two tokens.
ROUNDING = 0.25


def test_scores_with_vllms_kernels() -> None:
    folder = Path(tempfile.mkdtemp(prefix="specplug-hybrid-")) / "target"
    target = make_hybrid_target(folder, "Qwen3Next", 300, size=64)
    made = pair(
        model=str(target),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        speculative={"num_speculative_tokens": 8, "tree_budget": 8},
    )
    params = greedy(max_tokens=40, detokenize=False, logprobs=2)
    expected = generate(made.plain, WINDOW_PROMPTS, params)
    OracleDrafter.sequences = sequences_of(expected)
    actual = generate(made.tree, WINDOW_PROMPTS, params)
    assert made.take_counts().accepted > 100
    compared, errors = 0, []
    for a, b in zip(expected, actual, strict=True):
        for x, y in zip(*(_scored(o) for o in (a, b)), strict=True):
            (token, scores), (other, others) = x, y
            if token != other:
                best, second = sorted((s.logprob for s in scores.values()), reverse=True)[:2]
                assert best - second < 2 * ROUNDING, (token, other, best, second)
                break
            errors.append(abs(scores[token].logprob - others[token].logprob))
            compared += 1
    print(f"{compared} tokens, largest difference {max(errors):.3f}")
    assert compared > 150 and max(errors) < ROUNDING, (compared, max(errors))


def _scored(output: Any) -> list[tuple[int, Any]]:
    completion = output.outputs[0]
    return list(zip(completion.token_ids, completion.logprobs, strict=True))
