# SPDX-License-Identifier: Apache-2.0
"""The compiled trees of a local head equal the readable ones; candidates equal torch's."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.local_trees import (
    DEPTH,
    HEADS,
    LIMITS,
    SLOT_HEADS,
    WIDTH,
    builder,
    candidates,
)
from vllm_specplug.kernels import top_candidates
from vllm_specplug.methods.local.tree import LocalTreeBuilder
from vllm_specplug.tree import DraftTree

ANCHORS = [5, 7, 11, 250, 299, 0]


def same_trees(trees: list[DraftTree], oracles: list[DraftTree]) -> None:
    for tree, oracle in zip(trees, oracles, strict=True):
        tree.validate()
        assert tree.token_ids.tolist() == oracle.token_ids.tolist()
        assert tree.parent_indices.tolist() == oracle.parent_indices.tolist()
        assert tree.depths.tolist() == oracle.depths.tolist()
        assert np.allclose(tree.scores, oracle.scores, atol=2e-4)


def build(b: LocalTreeBuilder, count: int, *, compiled: bool = True) -> list[DraftTree]:
    """Returns trees of six requests over `count` candidates."""
    assert b.weights is not None
    args = (*candidates(6, count), ANCHORS, *LIMITS.values(), WIDTH)
    return b.build(*args, terms=slot_terms(b), compiled=compiled)


@cache
def readable(name: str, dtype: torch.dtype, anchor: bool, count: int) -> list[DraftTree]:
    """Returns the trees of the readable builder, which uses no instruction sets."""
    b = builder(name, dtype, anchor=anchor, has_prior=name in HEADS)
    return build(b, count, compiled=False)


def slot_terms(b: LocalTreeBuilder) -> torch.Tensor | None:
    """Random terms of the slots that the head reads."""
    count = b.head.config.num_slot_terms
    terms = torch.randn(6, DEPTH, count, generator=torch.Generator().manual_seed(9))
    return terms.to(b.output_table.dtype) if count else None


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize("gate_table_bytes", [0, 1 << 20])
def test_float32_trees_equal_the_readable_ones(
    isa: str, name: str, anchor: bool, gate_table_bytes: int
) -> None:
    b = builder(name, torch.float32, anchor=anchor, gate_table_bytes=gate_table_bytes)
    trees, oracles = build(b, 64), readable(name, torch.float32, anchor, 64)
    assert max(tree.max_depth for tree in oracles) >= 4
    same_trees(trees, oracles)
    assert all(t.num_nodes <= most for t, most in zip(trees, LIMITS["budgets"], strict=True))


@pytest.mark.parametrize("name", SLOT_HEADS)
def test_terms_of_slots_change_the_scores_of_their_depths(isa: str, name: str) -> None:
    b = builder(name, torch.float32, anchor=True, has_prior=False)
    terms = slot_terms(b)
    assert terms is not None
    # The second of these anchors is no draft id.
    args = (*candidates(6, 16), ANCHORS, *LIMITS.values(), WIDTH)
    oracles = b.build(*args, terms=terms, compiled=False)
    same_trees(b.build(*args, terms=terms), oracles)
    for other in (torch.ones_like(terms), terms.roll(1, 1)):
        with pytest.raises(AssertionError):
            same_trees(b.build(*args, terms=other), oracles)


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize("name", ["markov", "gru"])
def test_a_confidence_lowers_all_children_of_a_node_alike(
    compiled: None, name: str, weight: float
) -> None:
    b = builder(name, torch.float32, anchor=True, confidence_weight=weight)
    ids, log_probs = candidates(6, 64)
    slots = 2 * torch.randn(6, DEPTH, generator=torch.Generator().manual_seed(9))
    # The second of these anchors is no draft id.
    args = (ids, log_probs, ANCHORS, *LIMITS.values(), WIDTH)
    trees, oracles = b.build(*args, slots), b.build(*args, slots, compiled=False)
    without = b.build(*args)
    assert any(
        a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(trees, without, strict=True)
    )
    same_trees(trees, oracles)
    # A chain of one node: its parent is the anchor.
    assert b.confidence is not None
    of_anchor = torch.nn.functional.logsigmoid(slots[1, 0] + b.confidence.of_token[7])
    lowered = trees[1].scores[0] - without[1].scores[0]
    assert lowered == pytest.approx(weight * float(of_anchor), abs=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*HEADS, *SLOT_HEADS])
def test_scores_of_sixteen_bits_are_near_the_readable_ones(
    isa: str, name: str, dtype: torch.dtype
) -> None:
    """The kernel keeps states in float32: it is no further from float32 than torch's 16 bits."""
    trees = build(builder(name, dtype, anchor=True, has_prior=name in HEADS), 61)
    rounded, exact = (readable(name, kind, True, 61) for kind in (dtype, torch.float32))

    def error(candidates: Any) -> float:
        return max(
            float(np.abs(np.sort(tree.scores) - np.sort(oracle.scores)).max(initial=0.0))
            for tree, oracle in zip(candidates, exact, strict=True)
        )

    for tree, oracle in zip(trees, exact, strict=True):
        tree.validate()
        assert tree.num_nodes == oracle.num_nodes
    assert 0 < error(trees) <= 2 * error(rounded) + 0.02


def test_a_state_that_was_never_corrected_is_still_carried(compiled: None) -> None:
    """alpha 0 at one depth leaves the state alone: deeper scores still know the whole branch."""
    b = builder("gru", torch.float32, anchor=False)
    object.__setattr__(b.options, "alpha", (0.0, 0.0, 2.0, 2.0, 2.0))
    b.alpha = torch.tensor(b.options.alpha)
    for tree, oracle in zip(build(b, 64), build(b, 64, compiled=False), strict=True):
        assert tree.token_ids.tolist() == oracle.token_ids.tolist()


def test_bad_arguments_are_refused(compiled: None) -> None:
    b = builder("gru", torch.float32, anchor=False)
    ids, log_probs = candidates(1, 8)
    with pytest.raises(RuntimeError, match="candidate 500 is outside"):
        b.build(ids + 500 - ids[0, 0, 0], log_probs, [0], [4], [2], 2)
    with pytest.raises(RuntimeError, match="depth 9"):
        b.build(ids, log_probs, [0], [4], [9], 2)
    for name in ("gated", "rnn"):
        b = builder(name, torch.float32, anchor=True, has_prior=False)
        with pytest.raises(RuntimeError, match=f"a head of kind {name} does not fit"):
            b.build(ids, log_probs, [0], [4], [2], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "count"), [(7, 3), (49, 49), (1000, 1), (12288, 128), (30011, 8)]
)
def test_top_candidates_equal_torchs(
    compiled: None, dtype: torch.dtype, vocab: int, count: int
) -> None:
    torch.manual_seed(vocab)
    logits = (4 * torch.randn(2, 3, vocab)).to(dtype)
    ids, log_probs = top_candidates(logits, count)
    expected = logits.float().log_softmax(-1)
    order = expected.sort(dim=-1, descending=True, stable=True)
    assert torch.allclose(log_probs, order.values[..., :count], atol=1e-4)
    assert torch.equal(ids, order.indices[..., :count])


def test_top_candidates_pass_over_what_is_not_a_number(compiled: None) -> None:
    logits = torch.full((1, 40), float("-inf"))
    logits[0, 3], logits[0, 5], logits[0, 9] = 1.0, float("nan"), 2.0
    ids, log_probs = top_candidates(logits, 4)
    assert ids[0, :2].tolist() == [9, 3]
    assert torch.isfinite(log_probs[0]).tolist() == [True, True, False, False]


def confident(tail: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of 8 requests: one token of each depth has probability 1 - tail, 127 share it."""
    draw = torch.Generator().manual_seed(seed)
    count = 128
    log_probs = torch.full((8, DEPTH, count), math.log(tail / (count - 1)))
    log_probs[..., 0] = math.log1p(-tail)
    ids = torch.rand((8, DEPTH, 200), generator=draw).argsort(-1)[..., :count].contiguous()
    return ids, log_probs


@pytest.mark.parametrize("compiled_kernels", [True, False])
@pytest.mark.parametrize("tail", [1e-3, 1e-6])
def test_no_child_of_a_confident_head_outscores_its_parent(
    compiled: None, tail: float, compiled_kernels: bool
) -> None:
    b = builder("markov", torch.float32, anchor=True)
    for seed in range(10):
        ids, log_probs = confident(tail, seed)
        anchors = list(range(seed, seed + 8))
        for tree in b.build(
            ids, log_probs, anchors, [16] * 8, [DEPTH] * 8, 8, compiled=compiled_kernels
        ):
            tree.validate()
            assert tree.num_nodes == 16 and (tree.scores <= 0).all()
            assert (np.diff(tree.scores) <= 0).all()
