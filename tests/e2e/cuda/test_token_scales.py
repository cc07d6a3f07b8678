# SPDX-License-Identifier: Apache-2.0
"""Caches in which each token and head has a scale of its own, as on CUDA, against plain vLLM
over the same cache."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e.cuda.cuda_pairs import INTERPRETED, PROMPTS, compare_windows, engines, is_equal
from tests.e2e.number_formats import VOCAB, folder, head
from tests.e2e.pair import Pair
from tests.e2e.requests import greedy
from tests.e2e.tiny import make_target

pytestmark = [*INTERPRETED, pytest.mark.full]


def _check(made: Pair, stored: torch.dtype) -> None:
    caches = made.runner.state.target_caches().values()
    assert {cache.dtype for cache in caches} == {stored}
    assert compare_windows(made).skipping > 1


def _target(kind: str) -> dict[str, Any]:
    path = make_target(folder() / "plain", VOCAB)
    return {"model": str(path), "skip_tokenizer_init": True, "kv_cache_dtype": kind}


def test_draft_heads_beside_int8_caches() -> None:
    """A head's own keys and values keep the model's dtype, in pages of another size."""
    made = engines(
        "jetspec",
        ahead=True,
        target=_target("int8_per_token_head"),
        head={"model": str(head())},
    )
    backend = made.runner.tree_backend
    assert {sample.keys.dtype for sample in backend.samples} == {torch.int8}
    made.compare(PROMPTS, greedy(max_tokens=20, detokenize=False))


@pytest.mark.parametrize(
    ("kind", "stored"),
    [("int8_per_token_head", torch.int8), ("fp8_per_token_head", torch.uint8)],
)
def test_scales_of_each_token(kind: str, stored: torch.dtype) -> None:
    made = engines(ahead=True, target=_target(kind))
    _check(made, stored)
    lost = patch.object(made.runner.tree_backend, "compact", lambda *args: None)
    assert not is_equal(made, lost)
