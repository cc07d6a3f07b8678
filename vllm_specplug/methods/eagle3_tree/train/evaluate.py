# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of an EAGLE-3 head, drafting level by level; see `train.level_trees`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.train import level_trees
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.level_trees import BranchAttention, TreePolicy, evaluate_trees
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import AcceptanceReport
from vllm_specplug.tree.beam import BranchRows, Expand, Frontier

POLICIES = {**level_trees.POLICIES, "best_first/32": TreePolicy(32, depth=7)}


class SequenceDrafter(level_trees.SequenceDrafter[FeatureSequence]):
    """Drafts from any position of one sequence except the first."""

    @torch.no_grad()
    def __init__(self, head: Eagle3Head, sequence: FeatureSequence, tables: DraftTables) -> None:
        super().__init__(sequence, tables)
        self.head, self.dtype = head, next(head.parameters()).dtype
        self.states = head.features(sequence.aux[:-1].to(self.dtype))
        embeds = tables.embed_tokens[sequence.tokens[1:]].to(self.dtype)
        positions = torch.arange(len(sequence.tokens) - 1)
        self.key, self.value = head.context_kv(embeds, self.states, positions)

    def expander(self, anchor: int, width: int) -> Expand:
        root = anchor - 1
        rows = BranchRows(1)
        attend = BranchAttention(self.key[:root], self.value[:root], rows)
        states = self.states[root : root + 1]

        @torch.no_grad()
        def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            nonlocal states
            rows.add(frontier)
            parents = frontier.parent_rows if frontier.depth else frontier.requests
            tokens = torch.from_numpy(frontier.token_ids)
            embeds = self.tables.embed_tokens[tokens].to(self.dtype)
            positions = torch.full((len(frontier),), root + frontier.depth)
            state = states[torch.from_numpy(parents)]
            hidden, states = self.head(embeds, state, positions, attend)
            return self.children(hidden, width)

        return expand


def evaluate_eagle3(
    head: Eagle3Head,
    sequences: Sequence[FeatureSequence],
    tables: DraftTables,
    policies: Mapping[str, TreePolicy] = POLICIES,
    max_rounds: int = 1 << 30,
) -> AcceptanceReport:
    """Returns the acceptance by policy on the CPU in float32, over at most `max_rounds` rounds per
    sequence."""
    head, tables = head.cpu(), tables.to("cpu").to(torch.float32)
    return evaluate_trees(
        lambda sequence: SequenceDrafter(head, sequence, tables), sequences, policies, max_rounds
    )
