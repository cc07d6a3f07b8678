# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of a LongSpec layer, without a server.

The walk is that of block heads: from committed position to committed position of the target's own
answer, each round accepted as far as the answer follows the draft tree. A round drafts as
serving does: the cache ends before the anchor and levels follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.methods.block.train.evaluate import AcceptanceReport
from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.features import KVSequence
from vllm_specplug.methods.longspec.train.trainer import causal_attention
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import BranchRows, Expand, Frontier, draft_level_by_level


@dataclass(frozen=True)
class TreePolicy:
    """How a round drafts: best-first under `budget`, or the beam of `beam_widths`."""

    budget: int
    depth: int = 5
    beam_widths: tuple[int, ...] | None = None
    width: int = 8


POLICIES: dict[str, TreePolicy] = {
    "chain": TreePolicy(5, width=1),
    "best_first/8": TreePolicy(8),
    "best_first/16": TreePolicy(16),
    "best_first/32": TreePolicy(32),
}


class SequenceDrafter:
    """Drafts from any position of one sequence.

    Args:
        embed_tokens: [V, H] of the target; lm_head: [V', H] draft rows of the target's LM head;
        target_ids: int64 [V'], the target token of each draft id.
    """

    def __init__(
        self,
        head: LongSpecHead,
        sequence: KVSequence,
        embed_tokens: torch.Tensor,
        lm_head: torch.Tensor,
        target_ids: torch.Tensor,
    ) -> None:
        self.head, self.sequence = head, sequence
        self.embed_tokens, self.lm_head, self.target_ids = embed_tokens, lm_head, target_ids
        dtype = next(head.parameters()).dtype
        self.dtype = dtype
        self.window_key, self.window_value = head.window_kv(
            embed_tokens[sequence.tokens].to(dtype), sequence.positions
        )
        self.key, self.value = sequence.key.to(dtype), sequence.value.to(dtype)

    def draft(self, anchor: int, policy: TreePolicy) -> DraftTree:
        """The tree below the token at index `anchor`, which is not in the caches yet."""
        return draft_level_by_level(
            [int(self.sequence.tokens[anchor])],
            [policy.budget],
            [policy.depth],
            [policy.width],
            self._expander(anchor, policy.width),
            beam_widths=policy.beam_widths,
        )[0]

    def _expander(self, anchor: int, width: int) -> Expand:
        head = self.head
        first = max(0, anchor - head.config.window_size)
        keys, values = [self.window_key[first:anchor]], [self.window_value[first:anchor]]
        rows = BranchRows(1)
        position = int(self.sequence.positions[anchor])

        def self_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys.append(k)
            values.append(v)
            key, value = torch.cat(keys), torch.cat(values)
            mask = torch.zeros(len(q), len(key), dtype=torch.bool)
            mask[:, : anchor - first] = True
            mask[:, anchor - first :] = _ancestors(rows.parents[0])[-len(q) :]
            return causal_attention(q[None], key[None], value[None], mask[None])[0]

        def cross_attend(q: torch.Tensor) -> torch.Tensor:
            if anchor == 0:
                return torch.zeros_like(q)
            mask = torch.ones(len(q), anchor, dtype=torch.bool)
            return causal_attention(
                q[None], self.key[None, :anchor], self.value[None, :anchor], mask[None]
            )[0]

        @torch.no_grad()
        def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            rows.add(frontier)
            embeds = self.embed_tokens[torch.from_numpy(frontier.token_ids)].to(self.dtype)
            positions = torch.full((len(frontier),), position + frontier.depth)
            hidden = head(embeds, positions, self_attend, cross_attend)
            logits = (hidden.to(self.lm_head.dtype) @ self.lm_head.t()).float()
            top = logits.topk(width, dim=-1)
            log_probs = top.values - logits.logsumexp(-1, keepdim=True)
            return self.target_ids[top.indices].numpy(), log_probs.numpy()

        return expand


def _ancestors(parents: Sequence[int]) -> torch.Tensor:
    """bool [n, n] of anchor and rows: which row attends which."""
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for row, parent in enumerate(parents, start=1):
        mask[row] |= mask[parent + 1]
    return mask


def evaluate_longspec(
    head: LongSpecHead,
    sequences: Sequence[KVSequence],
    embed_tokens: torch.Tensor,
    lm_head: torch.Tensor,
    target_ids: torch.Tensor,
    policies: Mapping[str, TreePolicy] = POLICIES,
    max_rounds: int = 64,
    on_sequence: Callable[[int], None] | None = None,
) -> AcceptanceReport:
    """Acceptance by policy, over at most `max_rounds` rounds per sequence."""
    report = AcceptanceReport()
    for index, sequence in enumerate(sequences):
        drafter = SequenceDrafter(head, sequence, embed_tokens, lm_head, target_ids)
        tokens = sequence.tokens.tolist()
        for name, policy in policies.items():
            anchor, rounds = max(sequence.prompt_len, 1), 0
            while anchor + 1 < len(tokens) and rounds < max_rounds:
                accepted = _accepted(drafter.draft(anchor, policy), tokens[anchor + 1 :])
                for counts in (report.total[name], report.by_source[sequence.source][name]):
                    counts.rounds += 1
                    counts.accepted += accepted
                rounds += 1
                anchor += accepted + 1
        if on_sequence is not None:
            on_sequence(index)
    return report


def _accepted(tree: DraftTree, truth: Sequence[int]) -> int:
    parent, count = -1, 0
    for token in truth:
        child = tree.child_of(parent, token)
        if child is None:
            break
        parent, count = child, count + 1
    return count
