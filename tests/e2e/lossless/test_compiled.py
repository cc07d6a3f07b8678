# SPDX-License-Identifier: Apache-2.0
"""Compiled engines where what is compiled, or what is warmed up before it serves, differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import assert_drafted, run_engine, with_own_budgets
from tests.e2e.tiny import make_head, make_target, make_tokenswift_heads
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("compiled")]

CALLS = [{"prompts": PROMPTS, "params": PARAMS}]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("compiled") / "target", VOCAB)


@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_an_engine_in_processes_of_its_own(target: Path, tmp_path: Path, ahead: bool) -> None:
    """As users start it, and with as few rows as its trees need."""
    head = make_head(tmp_path / "head", VOCAB)
    speculative = {"method": "jetspec", "model": str(head), "num_speculative_tokens": 23}
    engine = {
        **tiny_engine(target), "enforce_eager": False, "async_scheduling": ahead,
        "max_num_batched_tokens": 24,
    }  # fmt: skip
    calls = [with_own_budgets(call) for call in CALLS]
    tree = run_engine(engine, calls, speculative=speculative, own_processes=True)
    assert tree.token_ids() == run_engine(tiny_engine(target), CALLS).token_ids()
    assert_drafted(tree, least_acceptance=0.0)


def test_self_drafts_of_a_target_that_takes_embeddings(target: Path, tmp_path: Path) -> None:
    """The compiled model then takes nothing else, from a draft forward neither."""
    speculative = {
        "method": "tokenswift", "model": str(make_tokenswift_heads(tmp_path / "head", VOCAB)),
        "num_speculative_tokens": 12, "tree_budget": 12, "draft_source": "self", "kv_budget": 40,
    }  # fmt: skip
    engine = {**tiny_engine(target), "enforce_eager": False, "enable_prompt_embeds": True}
    tree = run_engine(engine, CALLS, speculative=speculative)
    assert tree.token_ids() == run_engine(tiny_engine(target), CALLS).token_ids()
    assert_drafted(tree, least_acceptance=0.0)
