# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of a LongSpec layer, drafting level by level; see `train.level_trees`.

As in serving, the target's cache ends before the anchor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.features import KVSequence
from vllm_specplug.train import level_trees
from vllm_specplug.train.level_trees import (
    POLICIES,
    BranchAttention,
    TreePolicy,
    attention,
    evaluate_trees,
)
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import AcceptanceReport
from vllm_specplug.tree.beam import BranchRows, Expand, Frontier


class SequenceDrafter(level_trees.SequenceDrafter[KVSequence]):
    """Drafts from any position of one sequence."""

    def __init__(self, head: LongSpecHead, sequence: KVSequence, tables: DraftTables) -> None:
        super().__init__(sequence, tables)
        self.head, self.dtype = head, next(head.parameters()).dtype
        self.window_key, self.window_value = head.window_kv(
            tables.embed_tokens[sequence.tokens].to(self.dtype), sequence.positions
        )
        self.key, self.value = sequence.key.to(self.dtype), sequence.value.to(self.dtype)

    def expander(self, anchor: int, width: int) -> Expand:
        rows = BranchRows(1)
        window = slice(max(0, anchor - self.head.config.window_size), anchor)
        self_attend = BranchAttention(self.window_key[window], self.window_value[window], rows)
        position = int(self.sequence.positions[anchor])

        def cross_attend(q: torch.Tensor) -> torch.Tensor:
            if anchor == 0:
                return torch.zeros_like(q)
            mask = torch.ones(len(q), anchor, dtype=torch.bool)
            return attention(
                q[None], self.key[None, :anchor], self.value[None, :anchor], mask[None]
            )[0]

        @torch.no_grad()
        def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            rows.add(frontier)
            tokens = torch.from_numpy(frontier.token_ids)
            embeds = self.tables.embed_tokens[tokens].to(self.dtype)
            positions = torch.full((len(frontier),), position + frontier.depth)
            hidden = self.head(embeds, positions, self_attend, cross_attend)
            return self.children(hidden, width)

        return expand


def evaluate_longspec(
    head: LongSpecHead,
    sequences: Sequence[KVSequence],
    tables: DraftTables,
    policies: Mapping[str, TreePolicy] = POLICIES,
    max_rounds: int = 64,
) -> AcceptanceReport:
    """Returns the acceptance by policy on the CPU, over up to `max_rounds` rounds per sequence."""
    head, tables = head.cpu(), tables.to("cpu")
    return evaluate_trees(
        lambda sequence: SequenceDrafter(head, sequence, tables), sequences, policies, max_rounds
    )
