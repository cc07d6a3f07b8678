# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of an EAGLE-3 head (see `train.level_trees`). A round drafts as serving
does, level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.train import level_trees
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.level_trees import TreePolicy, branch_mask, evaluate_trees
from vllm_specplug.train.walk import AcceptanceReport
from vllm_specplug.tree.beam import BranchRows, Expand, Frontier

POLICIES: dict[str, TreePolicy] = {
    "chain": TreePolicy(5, width=1),
    "best_first/8": TreePolicy(8),
    "best_first/16": TreePolicy(16),
    "best_first/32": TreePolicy(32, depth=7),
}


class SequenceDrafter(level_trees.SequenceDrafter[FeatureSequence]):
    """Drafts from any position of one sequence but the first.

    Args:
        embed_tokens: [V, H]; the others as in the base class.
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
        super().__init__(sequence, lm_head, target_ids)
        self.head, self.embed_tokens = head, embed_tokens
        self.dtype = next(head.parameters()).dtype
        self.states = head.features(sequence.aux[:-1].to(self.dtype))
        embeds = embed_tokens[sequence.tokens[1:]].to(self.dtype)
        positions = torch.arange(len(sequence.tokens) - 1)
        self.key, self.value = head.context_kv(embeds, self.states, positions)

    def expander(self, anchor: int, width: int) -> Expand:
        root = anchor - 1
        keys, values = [self.key[:root]], [self.value[:root]]
        rows = BranchRows(1)
        states = self.states[root : root + 1]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys.append(k)
            values.append(v)
            mask = branch_mask(rows.parents[0], len(q), root)
            heads = [x.transpose(0, 1)[None] for x in (q, torch.cat(keys), torch.cat(values))]
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
            return self.children(hidden, width)

        return expand


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

    def drafter(sequence: FeatureSequence) -> SequenceDrafter:
        return SequenceDrafter(head, sequence, embed_tokens, lm_head, target_ids)

    return evaluate_trees(drafter, sequences, policies, max_rounds)
