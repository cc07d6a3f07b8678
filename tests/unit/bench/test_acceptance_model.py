# SPDX-License-Identifier: Apache-2.0
"""The acceptance that the GPU speed bench imposes on drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.gpu import acceptance_model as model
from bench.gpu import speed_engine as engine
from vllm_specplug.kernels import build_best_first

VOCAB, DEPTH, WIDTH = 200, 15, 8
PUBLISHED = model.PUBLISHED["jetspec"]


def imposed(a: float, nodes: int, requests: int) -> list[int]:
    """Accepted nodes of trees that are built of overwritten candidates, walked along the chain."""
    drafts = engine.ImposedDrafts(VOCAB, DEPTH, WIDTH)
    drafts.set(a, nodes, torch.device("cpu"))
    anchors = torch.arange(requests) % VOCAB
    shape = (requests, DEPTH, WIDTH)
    ids, log_probs = drafts.block(anchors, torch.zeros(shape))
    counts, depths = torch.full((2, requests), nodes), torch.full((requests,), DEPTH)
    trees = build_best_first(ids, log_probs, counts[0].int(), depths.int(), WIDTH)
    following = model.successors(VOCAB, 1)[:, 0]
    accepted = []
    for token, tokens, parents, count in zip(
        anchors.tolist(), trees[0].tolist(), trees[1].tolist(), trees[4].tolist(), strict=True
    ):
        children = {(parents[n], tokens[n]): n for n in range(count)}
        assert len(children) == count, "siblings repeat a token"
        at, length = -1, 0
        while (child := children.get((at, token := int(following[token])))) is not None:
            at, length = child, length + 1
        accepted.append(length)
    return accepted


@pytest.mark.parametrize("nodes", [7, 15, 63])
@pytest.mark.parametrize("task", ["GSM8K", "MT-Bench"])
def test_trees_accept_what_is_imposed(task: str, nodes: int) -> None:
    a = model.fit(PUBLISHED.lengths[task], PUBLISHED.nodes, DEPTH, WIDTH)
    assert model.mean_acceptance(a, 15, DEPTH, WIDTH) == pytest.approx(PUBLISHED.lengths[task])
    expected = model.mean_acceptance(a, nodes, DEPTH, WIDTH)
    assert 1 + np.mean(imposed(a, nodes, 400)) == pytest.approx(expected, abs=0.05)
    # Another model's acceptance shows.
    assert 1 + np.mean(imposed(a + 0.03, nodes, 400)) > expected + 0.1


def test_the_chain_visits_every_token() -> None:
    chain = model.successors(VOCAB, 3)
    assert sorted(chain[:, 0].tolist()) == list(range(VOCAB))
    token, seen = 0, set()
    while token not in seen:
        seen.add(token)
        assert chain[token].tolist()[1:] == chain[chain[token, 0]].tolist()[:2]
        token = int(chain[token, 0])
    assert len(seen) == VOCAB
