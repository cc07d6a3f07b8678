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
    assert _settings() == TokenSwiftSettings("auto", 4096, 16, 4080, 4, 4, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_budget": 32}, r"kv_budget=32 .*sink_size=16 \+ num_speculative_tokens=16 \+ 1 = 33"),
        ({"kv_budget": 100, "kv_refresh": 85}, r"kv_refresh=85 .*84"),
        ({"gamma": 5}, r"gamma=5 .*3 heads.*1\.\.4"),
        ({"draft_source": "ngrams", "ngram_topk": 0}, r"ngram_topk=0 .*1\.\.16"),
        ({"tree_widths": []}, "tree_widths"),
        ({"tree_widths": [1, 0]}, "tree_widths"),
        ({"tree_widths": [1, 1, 1, 1, 1]}, "gamma=4"),
        ({"tree_widths": [1, 3, 3, 3]}, "40 nodes, more than num_speculative_tokens=16"),
    ],
)
def test_impossible_combinations_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _settings(**given)


def test_the_published_tree_fits_its_budget() -> None:
    assert _settings(40, tree_widths=[1, 3, 3, 3]).tree_widths == (1, 3, 3, 3)
