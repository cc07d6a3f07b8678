# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution, shown by statistics on a small vocabulary.

A random target with few tokens makes the exact joint distribution of two consecutive tokens
computable, and a random head proposes trees that are right about as often as chance. Both
tokens come out of the same tree. A biased accept rule must fail the same test.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.tiny import make_head, make_local_head, make_longspec_head, make_target

pytestmark = pytest.mark.e2e

VOCAB = 12
SAMPLES = 12_000
PROMPT = [3, 7, 5, 9]
# The honest rule passes and the biased one fails by many orders of magnitude at this level.
LEVEL = 1e-4

METHODS: dict[str, dict[str, Any]] = {
    "jetspec": {
        "method": "jetspec",
        "num_speculative_tokens": 24,
        "tree_width": 6,
        "tree_budget": 24,
    },
    "jetspec_bidirectional": {
        "method": "jetspec",
        "num_speculative_tokens": 24,
        "tree_width": 6,
        "tree_budget": 24,
        "causal": False,
    },
    # Strong weights: the local head decides as much as the block head.
    "dels": {
        "method": "dels",
        "num_speculative_tokens": 24,
        "tree_width": 6,
        "tree_budget": 24,
        "causal": False,
        "alpha": 1.0,
        "beta": [0.3, 0.6, 0.9],
    },
    "longspec": {
        "method": "longspec",
        "num_speculative_tokens": 24,
        "tree_width": 6,
        "tree_depth": 3,
        "tree_budget": 24,
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    make_local_head(folder / "local", VOCAB)
    make_longspec_head(folder / "longspec", VOCAB)
    return make_target(folder / "target", VOCAB), make_head(folder / "head", VOCAB)


def _joint(target: Path) -> np.ndarray:
    """p(second, third token | prompt), [V, V], summed over the first; by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.no_grad()
    def next_token(prefixes: list[list[int]]) -> np.ndarray:
        return model(torch.tensor(prefixes)).logits[:, -1].double().softmax(-1).numpy()

    first = next_token([PROMPT])[0]
    second = next_token([[*PROMPT, a] for a in range(VOCAB)])
    pairs = [[*PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)]
    third = next_token(pairs).reshape(VOCAB, VOCAB, VOCAB)
    return np.einsum("a,ab,abc->bc", first, second, third)


def _sample(models: tuple[Path, Path], method: str, sabotage: tuple[str, ...] = ()) -> EngineResult:
    target, head = models
    engine = {
        "model": str(target),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "block_size": 32,
        "enable_prefix_caching": False,
        "seed": 7,
    }
    spec = {**METHODS[method], "model": str(head), "max_step_rows": 8192}
    if spec["method"] == "dels":
        spec["local_head"] = str(head.parent / "local")
    elif spec["method"] == "longspec":
        spec["model"] = str(head.parent / "longspec")
    params = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True, "detokenize": False}
    return run_engine(
        engine,
        [{"prompts": [PROMPT] * SAMPLES, "params": params}],
        speculative=spec,
        sabotage=sabotage,
    )


def _p_value(result: EngineResult, joint: np.ndarray) -> float:
    """Chi-square of the second and third token against `joint`; rare cells are pooled."""
    counts = Counter(tuple(ids[1:3]) for ids in result.token_ids())
    expected = joint.ravel() * len(result.token_ids())
    observed = np.array([counts[divmod(cell, VOCAB)] for cell in range(VOCAB * VOCAB)])
    order = np.argsort(expected)
    pooled = order[np.cumsum(expected[order]) <= 20]
    kept = np.setdiff1d(np.arange(VOCAB * VOCAB), pooled)
    expected_cells = np.append(expected[kept], expected[pooled].sum())
    observed_cells = np.append(observed[kept], observed[pooled].sum())
    if expected_cells[-1] == 0:
        expected_cells, observed_cells = expected_cells[:-1], observed_cells[:-1]
    return float(stats.chisquare(observed_cells, expected_cells, sum_check=False).pvalue)


@pytest.mark.parametrize("method", METHODS)
def test_sampled_pairs_have_the_targets_joint_distribution(
    models: tuple[Path, Path], method: str
) -> None:
    joint = _joint(models[0])
    honest = _sample(models, method)
    assert_drafted(honest)
    assert _p_value(honest, joint) > LEVEL

    biased = _sample(models, method, sabotage=("accept",))
    assert _p_value(biased, joint) < LEVEL, "the test cannot see a biased accept rule"
