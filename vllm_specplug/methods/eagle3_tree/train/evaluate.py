# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of an EAGLE-3 head, without a server.

The walk is that of the other heads: from committed position to committed position of the target's
own answer, each round accepted as far as the answer follows the draft tree. A round drafts as
serving does, level by level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.walk import AcceptanceReport
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import BranchRows, Expand, Frontier, draft_level_by_level


@dataclass(frozen=True)
class TreePolicy:
    """How a round drafts."""

    budget: int
    depth: int = 5
    width: int = 8
    expand_width: int = 16


POLICIES: dict[str, TreePolicy] = {
    "chain": TreePolicy(5, width=1),
    "best_first/8": TreePolicy(8),
    "best_first/16": TreePolicy(16),
    "best_first/32": TreePolicy(32, depth=7),
}


class SequenceDrafter:
    """Drafts from any position of one sequence.

    Args:
        embed_tokens: [V, H]; lm_head: [V', H]; target_ids: int64 [V'], the target token of each
            draft id.
    """

    @torch.no_grad()
    def __init__(
        self,
        head: Eagle3Head,
        sequence: FeatureSequence,
        embed_tokens: torch.Tensor,
        lm_head: torch.Tensor,
        target_ids: torch.Tensor,
    ) -> None:
        self.head, self.tokens = head, sequence.tokens
        self.embed_tokens, self.lm_head, self.target_ids = embed_tokens, lm_head, target_ids
        self.dtype = next(head.parameters()).dtype
        self.states = head.features(sequence.aux[:-1].to(self.dtype))
        embeds = embed_tokens[sequence.tokens[1:]].to(self.dtype)
        positions = torch.arange(len(sequence.tokens) - 1)
        self.key, self.value = head.context_kv(embeds, self.states, positions)

    def draft(self, anchor: int, policy: TreePolicy) -> DraftTree:
        """The tree below the token at index `anchor` >= 1, which is not in the cache yet."""
        return draft_level_by_level(
            [int(self.tokens[anchor])],
            [policy.budget],
            [policy.depth],
            [policy.width],
            self._expander(anchor, policy.width),
            frontier_width=policy.expand_width,
        )[0]

    def _expander(self, anchor: int, width: int) -> Expand:
        root = anchor - 1
        keys, values = [self.key[:root]], [self.value[:root]]
        rows = BranchRows(1)
        states = self.states[root : root + 1]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys.append(k)
            values.append(v)
            key, value = torch.cat(keys), torch.cat(values)
            mask = torch.zeros(len(q), len(key), dtype=torch.bool)
            mask[:, :root] = True
            mask[:, root:] = _ancestors(rows.parents[0])[-len(q) :]
            heads = [x.transpose(0, 1)[None] for x in (q, key, value)]
            mixed = torch.nn.functional.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], attn_mask=mask[None, None], enable_gqa=True
            )
            return mixed[0].transpose(0, 1)

        @torch.no_grad()
        def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            nonlocal states
            rows.add(frontier)
            parents = frontier.parent_rows if frontier.depth else frontier.requests
            embeds = self.embed_tokens[torch.from_numpy(frontier.token_ids)].to(self.dtype)
            positions = torch.full((len(frontier),), root + frontier.depth)
            state = states[torch.from_numpy(parents)]
            hidden, states = self.head(embeds, state, positions, attend)
            logits = (hidden.to(self.lm_head.dtype) @ self.lm_head.t()).float()
            top = logits.topk(width, dim=-1)
            log_probs = top.values - logits.logsumexp(-1, keepdim=True)
            return self.target_ids[top.indices].numpy(), log_probs.numpy()

        return expand


def _ancestors(parents: Sequence[int]) -> torch.Tensor:
    """bool [n, n] of root and rows: which row attends which."""
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for row, parent in enumerate(parents, start=1):
        mask[row] |= mask[parent + 1]
    return mask


def evaluate_eagle3(
    head: Eagle3Head,
    sequences: Sequence[FeatureSequence],
    embed_tokens: torch.Tensor,
    lm_head: torch.Tensor,
    target_ids: torch.Tensor,
    policies: Mapping[str, TreePolicy] = POLICIES,
    max_rounds: int = 1 << 30,
) -> AcceptanceReport:
    """Acceptance by policy, over at most `max_rounds` rounds per sequence."""
    report = AcceptanceReport()
    for sequence in sequences:
        drafter = SequenceDrafter(head, sequence, embed_tokens, lm_head, target_ids)
        tokens = sequence.tokens.tolist()
        for name, policy in policies.items():
            anchor, rounds = max(sequence.prompt_len, 1), 0
            while anchor + 1 < len(tokens) and rounds < max_rounds:
                accepted = _accepted(drafter.draft(anchor, policy), tokens[anchor + 1 :])
                report.total[name].add(accepted)
                report.by_source[sequence.source][name].add(accepted)
                rounds += 1
                anchor += accepted + 1
    return report


def _accepted(tree: DraftTree, truth: Sequence[int]) -> int:
    parent, count = -1, 0
    for token in truth:
        child = tree.child_of(parent, token)
        if child is None:
            break
        parent, count = child, count + 1
    return count
