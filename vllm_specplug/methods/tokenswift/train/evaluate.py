# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of TokenSwift's heads (see `train.level_trees`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_specplug.methods.tokenswift.head import TokenSwiftHeads
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.level_trees import evaluate_trees
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import AcceptanceReport
from vllm_specplug.tree import DraftTree, build_tree

_WIDTH = 8


class HeadsPolicy(NamedTuple):
    """A tree of `budget` nodes from the last verified position, or from the `anchor`'s own, as
    after a draft forward that agrees with the target: an upper bound for partial caches."""

    budget: int
    anchor: bool = False


POLICIES = {
    "heads/8": HeadsPolicy(8),
    "heads/16": HeadsPolicy(16),
    "self/8": HeadsPolicy(8, anchor=True),
    "self/16": HeadsPolicy(16, anchor=True),
}


class SequenceDrafter:
    """Drafts from any answer position of one sequence, with the target's `final_norm`."""

    def __init__(
        self,
        heads: TokenSwiftHeads,
        sequence: FeatureSequence,
        columns: slice,
        final_norm: torch.Tensor,
        tables: DraftTables,
    ) -> None:
        device = tables.lm_head.device
        self.start = max(sequence.prompt_len, 1)
        hidden = sequence.aux[self.start - 1 :, columns].to(device).float()
        weight = final_norm.float().to(device)
        base = F.rms_norm(hidden, weight.shape, weight, heads.config.rms_norm_eps)
        slots = tables.slots(torch.cat((base[None], heads(hidden))), _WIDTH)
        # [S, num_heads + 1, W]
        self.token_ids = tables.target_ids[slots.rows.cpu()].transpose(0, 1).numpy()
        self.log_probs = slots.log_probs.cpu().transpose(0, 1).numpy()

    def draft(self, anchor: int, policy: HeadsPolicy) -> DraftTree:
        """Returns the tree after the token at index `anchor`."""
        row, first = anchor - self.start + policy.anchor, 0 if policy.anchor else 1
        return build_tree(
            self.token_ids[row, first:],
            self.log_probs[row, first:],
            policy.budget,
            tree_width=_WIDTH,
            tree_depth=self.token_ids.shape[1],
        )


@torch.no_grad()
def evaluate_heads(
    heads: TokenSwiftHeads,
    sequences: Sequence[FeatureSequence],
    columns: slice,
    final_norm: torch.Tensor,
    tables: DraftTables,
    policies: Mapping[str, HeadsPolicy] = POLICIES,
) -> AcceptanceReport:
    """Returns the acceptance by policy on greedy answers."""

    def drafter(sequence: FeatureSequence) -> SequenceDrafter:
        return SequenceDrafter(heads, sequence, columns, final_norm, tables)

    return evaluate_trees(drafter, sequences, policies)
