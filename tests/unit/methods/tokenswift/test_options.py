# SPDX-License-Identifier: Apache-2.0
"""Options of method tokenswift: what is refused, with which message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_specplug.methods.tokenswift.options import TokenSwiftOptions, TokenSwiftSettings


def _settings(num_speculative_tokens: int = 16, ngram_topk: int = 3, **own: Any) -> Any:
    shared = SimpleNamespace(num_speculative_tokens=num_speculative_tokens, ngram_topk=ngram_topk)
    return TokenSwiftOptions(**own).settings(shared, num_heads=3)


def test_defaults() -> None:
    assert _settings() == TokenSwiftSettings("auto", 4096, 16, 4, 4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_budget": 18}, r"kv_budget=18 .*more than 2 \+ num_speculative_tokens=16"),
        ({"draft_source": "ngrams", "ngram_topk": 0}, r"ngram_topk=0 .*1\.\.16"),
    ],
)
def test_impossible_combinations_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _settings(**given)
