# SPDX-License-Identifier: Apache-2.0
"""Options of method tokenswift: what is refused, and with which words."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest

from vllm_specplug.methods.tokenswift.options import check_self_draft_options
from vllm_specplug.options import TreeOptions


def _options(**given):
    values = {}
    for field in fields(TreeOptions):
        default = field.default
        values[field.name] = default.default if hasattr(default, "default") else default
    return SimpleNamespace(**{**values, "num_speculative_tokens": 16, **given})


def test_defaults() -> None:
    resolved = check_self_draft_options(_options(), "tokenswift", self_drafts=True, num_heads=3)
    assert resolved is not None
    assert (resolved.kv_budget, resolved.sink_size, resolved.gamma) == (4096, 16, 4)
    assert resolved.kv_refresh == 4080
    assert resolved.source == "auto"


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
def test_impossible_combinations_are_refused(given, words) -> None:
    with pytest.raises(ValueError, match=words):
        check_self_draft_options(_options(**given), "tokenswift", self_drafts=True, num_heads=3)


def test_the_published_tree_fits_its_budget() -> None:
    options = _options(tree_widths=[1, 3, 3, 3], num_speculative_tokens=40)
    resolved = check_self_draft_options(options, "tokenswift", self_drafts=True, num_heads=3)
    assert resolved is not None
    assert resolved.tree_widths == (1, 3, 3, 3)


@pytest.mark.parametrize(
    "given",
    [{"kv_budget": 64}, {"draft_source": "self"}, {"gamma": 2}, {"self_draft_requests": 1}],
)
def test_other_methods_refuse_the_options(given) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"{name}=.*only 'tokenswift' does"):
        check_self_draft_options(_options(**given), "jetspec", self_drafts=False)
    assert check_self_draft_options(_options(), "jetspec", self_drafts=False) is None
