# SPDX-License-Identifier: Apache-2.0
"""Trees over fused distributions: the formula, the branches, and its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.methods.dels.local_heads import KINDS, H, V, make
from tests.unit.tree.candidates import paths_of
from vllm_specplug.methods.local.head import LocalHead
from vllm_specplug.methods.local.settings import LocalTreeSettings
from vllm_specplug.methods.local.tree import LocalTreeBuilder

DEPTH = 4
ALPHA, BETA = (0.2, 0.4, 0.3, 0.5), (0.1, 0.2, 0.3, 0.4)


def options(**changes: Any) -> LocalTreeSettings:
    usual = {"alpha": ALPHA, "beta": BETA, "num_candidates": V, "gate_table_bytes": 1 << 20}
    return LocalTreeSettings(**{**usual, **changes})


def build(
    head: LocalHead,
    settings: LocalTreeSettings,
    prior: torch.Tensor,
    embed: torch.Tensor,
    lm_head: torch.Tensor,
    local_ids: torch.Tensor | None = None,
    draft_ids: torch.Tensor | None = None,
) -> LocalTreeBuilder:
    """Of draft and local vocabularies, which are the target's where they are not given."""
    draft_ids = torch.arange(V) if draft_ids is None else draft_ids
    return LocalTreeBuilder(
        head, local_ids, draft_ids, prior, settings, embed_tokens=embed, lm_head=lm_head,
        dtype=torch.float32,
    )  # fmt: skip


class Case:
    """A random local head, prior and block head marginals."""

    def __init__(
        self,
        name: str = "gru_factorized",
        seed: int = 0,
        anchor_input: bool = True,
        **changes: Any,
    ) -> None:
        self.options = options(**changes)
        self.head: LocalHead = make(name, seed, anchor_input=anchor_input)
        torch.manual_seed(seed + 1)
        self.embed, self.lm_head = torch.randn(V, H), torch.randn(V, H)
        self.prior = torch.randn(V).log_softmax(-1)
        # [D, V]
        self.marginals = (2 * torch.randn(DEPTH, V)).log_softmax(-1)
        self.builder = build(self.head, self.options, self.prior, self.embed, self.lm_head)

    def candidates(self, count: int = V) -> tuple[torch.Tensor, torch.Tensor]:
        top = self.marginals.topk(count, dim=-1)
        return top.indices[None], top.values[None]

    def fused(self, anchor: int, path: list[int]) -> torch.Tensor:
        """[V] log-probabilities after a branch, by the formula, over the whole vocabulary."""
        i = len(path)
        read = [anchor, *path] if self.head.config.anchor_input else path
        scores = torch.zeros(V)
        if read:
            ranks = self.head.ranks(torch.tensor([read]), self.embed)[0, -1]
            scores = self.head.output_table(self.lm_head) @ ranks
        mixed = (
            self.marginals[i] + self.options.alpha[i] * scores - self.options.beta[i] * self.prior
        )
        return mixed.log_softmax(-1).detach()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("anchor_input", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_node_scores_what_the_formula_says(
    name: str, anchor_input: bool, compiled: bool
) -> None:
    weights = {} if anchor_input else {"alpha": (0.0, *ALPHA[1:]), "beta": (0.0, *BETA[1:])}
    case = Case(name, anchor_input=anchor_input, **weights)
    ids, log_probs = case.candidates()
    (tree,) = case.builder.build(ids, log_probs, [5], [30], [DEPTH], 6, compiled=compiled)
    tree.validate()
    assert tree.num_nodes == 30 and tree.max_depth > 1
    assert (np.diff(tree.scores) <= 0).all()
    for path, score in paths_of(tree).items():
        expected = sum(float(case.fused(5, path[:i])[path[i]]) for i in range(len(path)))
        assert score == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_tables_follow_the_target(name: str) -> None:
    case, fresh = Case(name), Case(name)
    builder = case.builder
    # As on a GPU, where graphs read both tables.
    has_gates = builder.head.config.kind == "gru"
    builder.gates = builder._input_gates() if has_gates else None
    tables = builder.output_table, builder.gates
    for made in (case, fresh):
        made.embed.copy_(torch.arange(V * H).reshape(V, H).sin())
    lm_head = torch.arange(V * H).reshape(V, H).cos()
    builder.follow_target(lm_head)
    assert builder.output_table is tables[0] and builder.gates is tables[1]
    # The host has no kernel that reads gates.
    gates, builder.gates = builder.gates, None
    expected = build(fresh.head, fresh.options, fresh.prior, fresh.embed, lm_head)
    ids, log_probs = case.candidates()
    for compiled in (True, False):
        ours, theirs = (
            made.build(ids, log_probs, [5], [30], [DEPTH], 6, compiled=compiled)[0]
            for made in (builder, expected)
        )
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-5)
    torch.testing.assert_close(builder.output_table, expected.output_table)
    if has_gates:
        torch.testing.assert_close(gates, expected._input_gates())


def test_few_candidates_share_the_block_heads_mass() -> None:
    case = Case()
    ids, log_probs = case.candidates(6)
    for compiled in (True, False):
        (tree,) = case.builder.build(ids, log_probs, [5], [6], [1], 6, compiled=compiled)
        mass = np.exp(tree.scores).sum()
        assert mass == pytest.approx(float(log_probs[0, 0].exp().sum()), rel=1e-4)


def test_requests_do_not_mix() -> None:
    case = Case()
    ids, log_probs = case.candidates()
    both = (torch.cat((ids, ids.flip(1))), torch.cat((log_probs, log_probs.flip(1))))
    trees = case.builder.build(*both, [5, 9], [12, 7], [DEPTH, 2], 4)
    for r, anchor in enumerate((5, 9)):
        (alone,) = case.builder.build(
            both[0][r : r + 1], both[1][r : r + 1], [anchor], [(12, 7)[r]], [(DEPTH, 2)[r]], 4
        )  # fmt: skip
        assert trees[r].token_ids.tolist() == alone.token_ids.tolist()
    assert trees[1].max_depth <= 2 and trees[1].num_nodes <= 7


def test_reduced_vocabularies_meet_by_target_id() -> None:
    """Draft ids, rows of the local head and prior are matched through target ids."""
    draft_ids = torch.tensor([3, 4, 8, 15, 20])
    local_ids = torch.tensor([1, 3, 4, 8, 15, 19, 20])
    head = make("gru_factorized", draft_vocab_size=len(local_ids), anchor_input=True)
    prior = torch.randn(V).log_softmax(-1)
    embed = torch.randn(V, H)
    marginals = torch.randn(DEPTH, 5).log_softmax(-1)
    builder = build(head, options(), prior, embed, torch.zeros(V, H), local_ids, draft_ids)
    top = marginals.topk(5, dim=-1)
    (tree,) = builder.build(top.indices[None], top.values[None], [5], [5], [1], 5)
    ranks = head.ranks(torch.tensor([[5]]), embed)[0, -1]
    scores = head.output_table()[torch.tensor([1, 2, 3, 4, 6])] @ ranks
    mixed = (marginals[0] + ALPHA[0] * scores - BETA[0] * prior[draft_ids]).log_softmax(-1)
    order = mixed.argsort(descending=True)
    assert tree.token_ids.tolist() == draft_ids[order].tolist()
    assert np.allclose(tree.scores, mixed[order].detach().numpy(), atol=1e-4)
    head = make("gru_factorized", draft_vocab_size=6)
    with pytest.raises(ValueError, match="1 of the 5 that the block head drafts are not"):
        build(head, options(), prior, embed, embed, local_ids[:-1], draft_ids)
