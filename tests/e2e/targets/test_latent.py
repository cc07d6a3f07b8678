# SPDX-License-Identifier: Apache-2.0
"""Trees over latent caches against plain decoding, float32."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.e2e.families import WINDOW_PROMPTS
from tests.e2e.latent import VOCAB, latent_target
from tests.e2e.latent_pairs import compared, engines, lines_for_trees, nothing_moves
from tests.e2e.requests import greedy
from tests.e2e.tiny import make_tokenswift_heads

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


def test_greedy_and_seeded() -> None:
    """DeepSeek-V2's shape; vLLM never expands a context for it."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl

    made = engines()
    unexpected = AssertionError("a context was expanded")
    with patch.object(MLACommonBaseImpl, "_compute_prefill_context", side_effect=unexpected):
        counts = compared(made, least_accepted=100)
    assert counts.skipping > 20, counts


def test_lines_for_trees_and_lost_compaction_show() -> None:
    made = engines()
    for wrong in (lines_for_trees, nothing_moves):
        with wrong(), pytest.raises(AssertionError, match="differs"):
            compared(made)
    # Nothing of it is left behind.
    compared(made, least_accepted=100)


def test_drafts_that_do_not_read_the_cache() -> None:
    """TokenSwift's heads read hidden states alone, its n-grams text."""
    with tempfile.TemporaryDirectory() as folder:
        heads = str(make_tokenswift_heads(Path(folder) / "heads", VOCAB))
        for source in ("heads", "ngrams"):
            options = {"model": heads, "draft_source": source}
            made = engines("tokenswift", model=latent_target(sharp=False), speculative=options)
            params = greedy(max_tokens=160, detokenize=False, ignore_eos=True)
            made.compare(WINDOW_PROMPTS, params, least_accepted=20)
