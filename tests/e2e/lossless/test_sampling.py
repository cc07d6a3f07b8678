# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution, shown by statistics on a small vocabulary.

A random target with few tokens makes the exact joint distribution of three consecutive tokens
computable, and random heads propose trees that are right about as often as chance. A rule that
accepts one draft in twenty that it should reject must fail the same test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine, with_own_budgets
from tests.e2e.statistics import BIAS, LEVEL, PROMPT, SAMPLES, VOCAB, TinyJoint, p_value, power
from tests.e2e.tiny import make_head, make_target
from tests.e2e.tiny_engine import tiny_engine

pytestmark = pytest.mark.e2e

# Three children a node: most samples are rejected, each a chance to be wrong.
TREE: dict[str, Any] = {
    "num_speculative_tokens": 12,
    "tree_budget": 12,
    "tree_width": 3,
    "tree_depth": 3,
    "max_step_rows": 8192,
    "ngram_topk": 0,
}
# What is sampled does not depend on the drafter. So one head is tested: with a fixed budget, and
# with the defaults, an adaptive budget and n-grams.
FIXED: dict[str, Any] = {**TREE, "method": "jetspec"}
DEFAULTS: dict[str, Any] = {"method": "jetspec", "max_step_rows": 8192}
TRUNCATIONS: dict[str, dict[str, Any]] = {"top_k": {"top_k": 4}, "top_p": {"top_p": 0.7}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target and its heads, each in a folder of its name."""
    folder = tmp_path_factory.mktemp("tiny")
    make_target(folder / "target", VOCAB)
    make_head(folder / "head", VOCAB)
    return folder


@pytest.fixture(scope="module")
def exact(models: Path) -> TinyJoint:
    return TinyJoint(models / "target")


def _sample(
    models: Path,
    speculative: dict[str, Any],
    params: list[dict[str, Any]],
    sabotage: tuple[str, ...] = (),
) -> EngineResult:
    """`SAMPLES` completions of PROMPT for each of `params`, from one engine."""
    engine = {
        **tiny_engine(models / "target"),
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "seed": 7,
    }
    spec = {**speculative, "model": str(models / "head")}
    # Five tokens: the first tree is drafted to its full depth.
    base = {"temperature": 1.0, "max_tokens": 5, "ignore_eos": True, "detokenize": False}
    calls = [{"prompts": [PROMPT] * SAMPLES, "params": {**base, **p}} for p in params]
    if "tree_budget" not in spec:
        calls = [with_own_budgets(call, nodes=12) for call in calls]
    return run_engine(engine, calls, speculative=spec, sabotage=sabotage)


def test_sampled_tokens_have_the_targets_joint_distribution(models: Path, exact: TinyJoint) -> None:
    honest = _sample(models, DEFAULTS, [{}])
    assert_drafted(honest)
    assert p_value(honest.token_ids(), exact.joint()) > LEVEL


def test_truncated_samples_have_the_truncated_distribution(models: Path, exact: TinyJoint) -> None:
    honest = _sample(models, FIXED, list(TRUNCATIONS.values()))
    assert_drafted(honest)
    for call, truncation in enumerate(TRUNCATIONS.values()):
        ids = honest.token_ids(call)
        assert p_value(ids, exact.joint(**truncation)) > LEVEL, truncation
        assert p_value(ids, exact.joint()) < LEVEL, "nothing was truncated"


def test_one_wrong_acceptance_in_twenty_is_noticed(models: Path, exact: TinyJoint) -> None:
    """The negative control, with the samples of the honest runs."""
    biased = _sample(models, FIXED, [{}], sabotage=("accept",))
    assert_drafted(biased)
    assert p_value(biased.token_ids(), exact.joint()) < LEVEL


def test_the_samples_suffice_for_such_a_bias(exact: TinyJoint) -> None:
    """Power, computed: whatever three tokens a node's children are."""
    rng = np.random.default_rng(0)
    joint = exact.joint()
    powers = [power(joint, exact.biased(BIAS, 3, rng), SAMPLES) for _ in range(20)]
    assert min(powers) > 0.95, powers
    # And an honest rule fails as seldom as it should.
    assert power(joint, joint, SAMPLES) == pytest.approx(LEVEL, rel=0.01)
