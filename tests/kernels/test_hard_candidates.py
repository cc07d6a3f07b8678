# SPDX-License-Identifier: Apache-2.0
"""Trees of local heads on sure, tied, masked and broken candidates, against every path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.local_trees import builder
from tests.unit.tree.candidates import checked_paths, columns_of
from vllm_specplug.kernels import top_candidates

FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def fused_rows(b, ids: np.ndarray, log_probs: np.ndarray, anchor: int) -> dict:
    """Every path of a Markov local head and its score, in float64 from the head's own tables."""
    inputs = b.head.input_features(torch.arange(300), b.embed_tokens).double().numpy()
    outputs, prior = b.output_table.double().numpy(), b.log_prior.double().numpy()
    draft_ids = b.draft_ids.tolist()
    level: dict[tuple[int, ...], float] = {(): 0.0}
    every: dict[tuple[int, ...], float] = {}
    for depth, (row, own) in enumerate(zip(ids, log_probs.astype(np.float64), strict=True)):
        alpha, beta = b.options.alpha[depth], b.options.beta[depth]
        grown = {}
        # The largest first: values near 0 would be lost in the sum otherwise.
        mass = min(float(np.logaddexp.reduce(own)), 0.0)
        for path, score in level.items():
            read = inputs[path[-1] if path else anchor]
            fused = own + alpha * outputs[row] @ read - beta * prior[row]
            with np.errstate(invalid="ignore"):
                fused = fused - np.logaddexp.reduce(fused) + mass
            for token, logp in zip(row, fused, strict=True):
                if math.isfinite(logp):
                    grown[(*path, draft_ids[token])] = score + min(logp, 0.0)
        every.update(grown)
        level = grown
    return every


@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
    kind=st.sampled_from(["plain", "confident", "masked", "tied", "nan", "nothing"]),
    budget=st.sampled_from([1, 5, 30, 500]),
    width=st.sampled_from([1, 3, 9]),
    compiled_kernels=st.booleans(),
)
@FEW
def test_local_trees(
    compiled: None, seed: int, scale: float, kind: str, budget: int, width: int,
    compiled_kernels: bool,
) -> None:  # fmt: skip
    b = builder("markov", torch.float32, anchor=True, seed=seed % 7)
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(1, 3, 200, generator=draw)
    if kind == "confident":
        logits[..., seed % 200] = logits.max() + 13.8
    elif kind == "masked":
        logits[..., 3:] = -math.inf
    elif kind == "tied":
        logits.zero_()
    elif kind == "nan":
        logits[:, 1] = math.nan
    elif kind == "nothing":
        logits.fill_(-math.inf)
    ids, log_probs = top_candidates(logits, 5)
    (tree,) = b.build(ids, log_probs, [11], [budget], [3], width, compiled=compiled_kernels)
    assert tree.fault(300) is None
    paths = checked_paths(*columns_of(tree))
    every = fused_rows(b, ids[0].numpy(), log_probs[0].numpy(), 11)
    near = 1e-4 * max(1.0, scale)
    for path, score in paths.items():
        assert score == pytest.approx(every[path], abs=near)
    if width >= 5:
        best = sorted(every.values(), reverse=True)[:budget]
        assert list(paths.values()) == pytest.approx(best, abs=near)


@pytest.mark.parametrize("name", ["gru", "gru_direct", "markov"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("compiled_kernels", [True, False])
def test_a_broken_local_head_drafts_valid_trees_or_none(
    compiled: None, name: str, value: float, compiled_kernels: bool
) -> None:
    """In every table in turn, all of it and one element."""
    torch.manual_seed(0)
    ids, log_probs = top_candidates(2 * torch.randn(4, 5, 200), 64)
    for where in (slice(None), 0):
        for parameter in range(
            len(list(builder(name, torch.float32, anchor=True).head.parameters()))
        ):
            b = builder(name, torch.float32, anchor=True)
            with torch.no_grad():
                list(b.head.parameters())[parameter].flatten()[where] = value
                b.output_table.flatten()[where] = value
            b.weights = b._compiled_weights()
            for tree in b.build(
                ids, log_probs, [1, 2, 3, 4], [16] * 4, [5] * 4, 4, compiled=compiled_kernels
            ):
                assert tree.fault(300) is None
