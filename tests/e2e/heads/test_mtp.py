# SPDX-License-Identifier: Apache-2.0
"""A target's own module under vLLM's method and as trees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.eagle3_chains import CHAIN, compare_drafts, own_engine
from tests.e2e.mimo import make_mimo_target
from tests.e2e.mtp import PROMPTS, VOCAB
from tests.e2e.pair import make_engine, pair
from tests.e2e.requests import greedy, seeded

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]
LONG = [3 + (7 * i * i + 3 * i) % 20 for i in range(101)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_mimo_target(tmp_path_factory.mktemp("target"), VOCAB)
    return {"model": str(folder), "skip_tokenizer_init": True, "trust_remote_code": True}


def test_chains_are_those_of_vllms_own_method(target: dict[str, Any]) -> None:
    """Found by the target itself, with prompts in a batch and after prefix hits."""
    engine = {**target, "enable_prefix_caching": True, "async_scheduling": False}
    ours = {**CHAIN, "method": "tree", "model": engine["model"]}
    engines = (
        own_engine("mtp", **engine),
        make_engine("mtp_tree", speculative=ours, **engine),
    )
    assert compare_drafts(engines, PROMPTS) > 20
    assert compare_drafts(engines, [LONG]) > 5
    assert compare_drafts(engines, [[*LONG[:96], 12, 3]]) > 5


def test_trees_are_lossless_and_branch(target: dict[str, Any]) -> None:
    """The module is the target's own where no model is named."""
    engines = pair("mtp_tree", **target)
    params = [greedy(detokenize=False), seeded(3, detokenize=False)]
    prompts = [p for p in PROMPTS for _ in params]
    engines.compare(prompts, [p.clone() for _ in PROMPTS for p in params], least_accepted=8)
