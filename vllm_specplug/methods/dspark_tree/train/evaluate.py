# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of a DSpark head (see `train.walk`), with the tree builder of serving."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_specplug.methods.block.train.evaluate import draft_sequences
from vllm_specplug.methods.dspark_tree.checkpoint import markov_head
from vllm_specplug.methods.dspark_tree.train.objective import DSparkModel
from vllm_specplug.methods.local.settings import LocalTreeSettings
from vllm_specplug.methods.local.tree import LocalTreeBuilder
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.level_trees import accepted_nodes
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import AcceptanceReport, Policy, Rounds, walk

# Nodes and maximum children of a node, by policy.
POLICIES = {
    "chain": (0, 1),
    "best_first/8": (8, 8),
    "best_first/16": (16, 8),
    "best_first/32": (32, 8),
}
CANDIDATES = 128


def tree_policy(
    builder: LocalTreeBuilder, tables: DraftTables, budget: int, width: int, depth: int
) -> Policy:
    """Returns the policy of the best tree of `budget` nodes; 0 for a chain of the head's depth."""

    def accepted(rounds: Rounds) -> torch.Tensor:
        count = len(rounds.anchors)
        trees = builder.build(
            rounds.slots.rows,
            rounds.slots.log_probs,
            rounds.anchors.tolist(),
            [budget or depth] * count,
            [depth] * count,
            [width] * count,
        )
        pairs = zip(trees, rounds.truth.tolist(), strict=True)
        return torch.tensor([accepted_nodes(tree, truth) for tree, truth in pairs])

    return accepted


@torch.no_grad()
def evaluate_dspark(
    model: DSparkModel,
    sequences: Sequence[FeatureSequence],
    tables: DraftTables,
) -> AcceptanceReport:
    """Returns the acceptance of chains and trees on the target's greedy answers."""
    depth = model.config.num_draft_tokens
    markov = model.markov_head
    builder = LocalTreeBuilder(
        markov_head(markov.markov_w1.weight.cpu(), markov.markov_w2.weight.cpu()),
        tables.target_ids,
        tables.target_ids,
        None,
        LocalTreeSettings.of_markov_head(depth, CANDIDATES),
        embed_tokens=tables.embed_tokens.cpu(),
        lm_head=tables.lm_head.cpu(),
        dtype=torch.float32,
    )
    drafted = list(draft_sequences(model.block, sequences, tables, CANDIDATES))
    report = AcceptanceReport()
    for name, (budget, width) in POLICIES.items():
        walk(drafted, name, tree_policy(builder, tables, budget, width, depth), report)
    return report
