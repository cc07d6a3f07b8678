# SPDX-License-Identifier: Apache-2.0
"""The drafter on made-up hidden states, and what it drafts from."""

from __future__ import annotations

import pytest
import torch

from tests.unit.drafters import load_drafter, requests_of
from vllm_specplug.drafting.caches import PartialCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.requests import DraftPenalties, DraftRequests
from vllm_specplug.methods.tokenswift.drafter import TokenSwiftDrafter
from vllm_specplug.methods.tokenswift.head import TokenSwiftConfig, TokenSwiftHeads, save_heads

HIDDEN, VOCAB = 16, 40
DRAFT_IDS = torch.arange(0, VOCAB, 2)


class FakeForward:
    """The target's forward: rows of a table, by anchor."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table, self.calls, self.dropped = table, 0, []

    def can_run(self, requests: DraftRequests) -> bool:
        return len(requests) <= 2

    def __call__(self, requests: DraftRequests):
        self.calls += 1
        hidden = self.table[requests.anchors]
        return hidden.roll(1, -1), hidden

    def forget(self, req_ids) -> None:
        self.dropped += req_ids


def _drafter(folder, source: str, *, ngram_topk: int = 0, reduced: bool = False):
    torch.manual_seed(0)
    heads = TokenSwiftHeads(
        TokenSwiftConfig(HIDDEN, VOCAB, len(DRAFT_IDS) if reduced else VOCAB, medusa_heads=3)
    )
    save_heads(folder, heads, dtype=torch.float32, target_ids=DRAFT_IDS if reduced else None)
    lm_head = torch.randn(VOCAB, HIDDEN)
    spec = PartialCacheSpec(64, 4, 2, ("requests", "budget")) if source == "self" else None
    drafter = load_drafter(
        TokenSwiftDrafter, folder, spec, lm_head, tree_width=3, ngram_topk=ngram_topk,
        max_model_len=100,
    )  # fmt: skip
    drafter.bind_target_forward(FakeForward(torch.randn(VOCAB, HIDDEN)))
    return drafter, heads.eval(), lm_head


def _requests(*texts, width: int = 3, budget: int = 12, penalties=None):
    return requests_of(texts, budget, width, 8, penalties=penalties)


def _observe(drafter, hidden, last_rows):
    at = torch.arange(len(hidden))
    drafter.observe(CommittedTokens([hidden], at, at, at, last_rows=torch.tensor(last_rows)))


def _best(states, lm_head):
    return [int((state @ lm_head.t()).argmax()) for state in states]


def test_heads_read_each_requests_last_committed_row(tmp_path) -> None:
    drafter, heads, lm_head = _drafter(tmp_path, "heads")
    hidden = torch.randn(6, HIDDEN)
    _observe(drafter, hidden, [4, 1])
    trees = drafter.propose(_requests([1, 2], [3, 4], width=1))
    for tree, row in zip(trees, (4, 1), strict=True):
        assert tree.token_ids.tolist() == _best(heads(hidden[row : row + 1])[:, 0], lm_head)
    assert drafter.target_forward.calls == 0
    assert drafter.partial_cache_spec() is None


def test_self_starts_with_the_targets_own_prediction(tmp_path) -> None:
    drafter, heads, lm_head = _drafter(tmp_path, "self")
    _observe(drafter, torch.randn(2, HIDDEN), [0, 1])
    trees = drafter.propose(_requests([1, 2], [3, 4], width=1))
    assert drafter.target_forward.calls == 1
    for tree, anchor in zip(trees, (2, 4), strict=True):
        hidden = drafter.target_forward.table[anchor]
        expected = _best([hidden.roll(1, -1)], lm_head) + _best(heads(hidden[None])[:, 0], lm_head)
        assert tree.token_ids.tolist() == expected
    spec = drafter.partial_cache_spec()
    assert (spec.budget, spec.sink, spec.max_requests) == (64, 4, 2)


@pytest.mark.parametrize("reduced", [False, True])
def test_drafts_are_penalised_like_samples(tmp_path, reduced) -> None:
    drafter, heads, lm_head = _drafter(tmp_path, "heads", reduced=reduced)
    hidden = torch.randn(1, HIDDEN)
    _observe(drafter, hidden, [0])
    (free,) = drafter.propose(_requests([1, 2], width=1))
    if reduced:
        assert set(free.token_ids.tolist()) <= set(DRAFT_IDS.tolist())
    tokens = torch.tensor([int(free.token_ids[0]), 1])
    penalties = DraftPenalties(tokens[None], torch.tensor([4.0]))
    (held,) = drafter.propose(_requests([1, 2], width=1, penalties=penalties))
    logits = heads(hidden)[:, 0] @ lm_head.t()
    if reduced:
        logits = logits[:, DRAFT_IDS]
        indices = torch.tensor([int((tokens[0] == DRAFT_IDS).nonzero())])
    else:
        indices = tokens
    before = logits[:, indices]
    logits[:, indices] = torch.where(before > 0, before / 4, before * 4)
    best = logits.argmax(-1)
    expected = DRAFT_IDS[best] if reduced else best
    assert held.token_ids.tolist() == expected.tolist()
    assert held.token_ids[0] != free.token_ids[0]


def test_without_room_in_the_pool_the_heads_draft(tmp_path) -> None:
    drafter, heads, lm_head = _drafter(tmp_path, "self", ngram_topk=2)
    hidden = torch.randn(3, HIDDEN)
    _observe(drafter, hidden, [0, 1, 2])
    trees = drafter.propose(_requests(*([[1, 2, 3, 1, 2]] * 3)))
    assert drafter.target_forward.calls == 0 and drafter.steps_from == {"heads": 1}
    for tree, row in zip(trees, hidden, strict=True):
        below_root = set(tree.token_ids[tree.parent_indices == -1].tolist())
        # The text's own continuation is a branch.
        assert {_best(heads(row[None])[0], lm_head)[0], 3} <= below_root
    drafter.forget(["r0"])
    assert drafter.target_forward.dropped == ["r0"]
