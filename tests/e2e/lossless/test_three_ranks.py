# SPDX-License-Identifier: Apache-2.0
"""Three tensor parallel ranks verify the same trees, and keep plain decoding's output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import assert_drafted, run_engine, with_own_budgets
from tests.e2e.tiny import (
    make_dflash2_head,
    make_dspark_head,
    make_head,
    make_local_head,
    make_target,
    make_tokenswift_heads,
)
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

# Two ranks are tested in every run; three processes on two cores take a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.full]

_CALLS = [{"prompts": PROMPTS, "params": PARAMS}]
# Three ranks sum every row-parallel product in three orders. vLLM pads vocabularies to 64 rows, so
# only one padded to 192 splits by three. LongSpec refuses tensor parallelism.
THREE_RANKS = {"tensor_parallel_size": 3}
WIDE_VOCAB, WIDE_HIDDEN = 180, 96


@pytest.fixture(scope="session")
def three_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of three attention heads, and every kind of draft head for it."""
    folder = tmp_path_factory.mktemp("three")
    make_target(folder / "target", WIDE_VOCAB, num_heads=3, live_tokens=VOCAB)
    make_head(folder / "causal", WIDE_VOCAB, hidden=WIDE_HIDDEN)
    make_head(folder / "block", WIDE_VOCAB, hidden=WIDE_HIDDEN, causal=False)
    make_dspark_head(folder / "dspark", WIDE_VOCAB, hidden=WIDE_HIDDEN)
    make_dflash2_head(folder / "dflash2", WIDE_VOCAB, hidden=WIDE_HIDDEN)
    make_local_head(folder / "gru", WIDE_VOCAB, hidden=WIDE_HIDDEN)
    make_tokenswift_heads(folder / "swift", WIDE_VOCAB, hidden=WIDE_HIDDEN)
    return folder


_SAMPLED = [*_CALLS, {"prompts": PROMPTS, "params": {**PARAMS, "temperature": 0.8, "seed": 7}}]
ON_THREE: dict[str, dict[str, Any]] = {
    "jetspec": {"method": "jetspec", "model": "causal", "ngram_topk": 3},
    "ddtree": {"method": "ddtree", "model": "block"},
    "dels": {"method": "dels", "model": "block", "local_head": "gru"},
    "dspark_tree": {"method": "dspark_tree", "model": "dspark"},
    "dflash2_tree": {"method": "dflash2_tree", "model": "dflash2"},
    "tokenswift": {
        "method": "tokenswift",
        "model": "swift",
        "kv_budget": 32,
        "self_draft_requests": 4,
    },
    "ngram_tree": {"method": "ngram_tree"},
}


@pytest.mark.xdist_group("three_ranks")
@pytest.mark.parametrize("method", ON_THREE)
def test_three_ranks_keep_the_output(three_heads: Path, method: str) -> None:
    """The default budget, which follows each process's own clock."""
    spec = {"num_speculative_tokens": 24, "max_step_rows": 512, **ON_THREE[method]}
    for name in ("model", "local_head"):
        if name in spec:
            spec[name] = str(three_heads / spec[name])
    target = three_heads / "target"
    calls = [with_own_budgets(call) for call in _SAMPLED]
    tree = run_engine(
        {**tiny_engine(target), **THREE_RANKS}, calls, speculative=spec, own_processes=True
    )
    plain = run_engine({**tiny_engine(target), **THREE_RANKS}, _SAMPLED, own_processes=True)
    for call in range(len(calls)):
        assert tree.token_ids(call) == plain.token_ids(call)
    assert_drafted(tree, least_acceptance=0.0)
