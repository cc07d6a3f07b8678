# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of a LongSpec layer (see `train.level_trees`). A round drafts as serving
does: the cache ends before the anchor and levels follow one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.features import KVSequence
from vllm_specplug.methods.longspec.train.trainer import causal_attention
from vllm_specplug.train import level_trees
from vllm_specplug.train.level_trees import TreePolicy, branch_mask, evaluate_trees
from vllm_specplug.train.walk import AcceptanceReport
from vllm_specplug.tree.beam import BranchRows, Expand, Frontier

POLICIES: dict[str, TreePolicy] = {
    "chain": TreePolicy(5, width=1),
    "best_first/8": TreePolicy(8),
    "best_first/16": TreePolicy(16),
    "best_first/32": TreePolicy(32),
}


class SequenceDrafter(level_trees.SequenceDrafter[KVSequence]):
    """Drafts from any position of one sequence.

    Args:
        embed_tokens: [V, H] of the target; the others as in the base class.
    """

    def __init__(
        self,
        head: LongSpecHead,
        sequence: KVSequence,
        embed_tokens: torch.Tensor,
        lm_head: torch.Tensor,
        target_ids: torch.Tensor,
    ) -> None:
        super().__init__(sequence, lm_head, target_ids)
        self.head, self.embed_tokens = head, embed_tokens
        dtype = next(head.parameters()).dtype
        self.dtype = dtype
        self.window_key, self.window_value = head.window_kv(
            embed_tokens[sequence.tokens].to(dtype), sequence.positions
        )
        self.key, self.value = sequence.key.to(dtype), sequence.value.to(dtype)

    def expander(self, anchor: int, width: int) -> Expand:
        head = self.head
        first = max(0, anchor - head.config.window_size)
        keys, values = [self.window_key[first:anchor]], [self.window_value[first:anchor]]
        rows = BranchRows(1)
        position = int(self.sequence.positions[anchor])

        def self_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys.append(k)
            values.append(v)
            mask = branch_mask(rows.parents[0], len(q), anchor - first)
            key, value = torch.cat(keys), torch.cat(values)
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
            return self.children(hidden, width)

        return expand


def evaluate_longspec(
    head: LongSpecHead,
    sequences: Sequence[KVSequence],
    embed_tokens: torch.Tensor,
    lm_head: torch.Tensor,
    target_ids: torch.Tensor,
    policies: Mapping[str, TreePolicy] = POLICIES,
    max_rounds: int = 64,
) -> AcceptanceReport:
    """Acceptance by policy, over at most `max_rounds` rounds per sequence."""

    def drafter(sequence: KVSequence) -> SequenceDrafter:
        return SequenceDrafter(head, sequence, embed_tokens, lm_head, target_ids)

    return evaluate_trees(drafter, sequences, policies, max_rounds)
