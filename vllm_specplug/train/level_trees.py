# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance of heads that draft level by level, without a server.

As in `walk`, a round drafts at a committed position of the target's answer and accepts as far as
the answer follows the tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import AcceptanceReport
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import BranchRows, Expand, draft_level_by_level


class AnsweredSequence(Protocol):
    """A sequence of any kind of features: tokens int64 [S], the first `prompt_len` the prompt."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def prompt_len(self) -> int: ...

    @property
    def source(self) -> str: ...


SequenceT = TypeVar("SequenceT", bound=AnsweredSequence)
PolicyT = TypeVar("PolicyT", contravariant=True)


@dataclass(frozen=True)
class TreePolicy:
    """How a round drafts: best-first under `budget`."""

    budget: int
    depth: int = 5
    width: int = 8
    expand_width: int | None = 16
    """Limit of the nodes expanded per level; None for no limit."""


POLICIES = {
    "chain": TreePolicy(5, width=1),
    "best_first/8": TreePolicy(8),
    "best_first/16": TreePolicy(16),
    "best_first/32": TreePolicy(32),
}


class Drafter(Protocol[PolicyT]):
    """Drafts from any position of one sequence."""

    def draft(self, anchor: int, policy: PolicyT) -> DraftTree: ...


class SequenceDrafter(ABC, Generic[SequenceT]):
    """Drafts from any position of one sequence, level by level."""

    def __init__(self, sequence: SequenceT, tables: DraftTables) -> None:
        self.sequence, self.tables = sequence, tables

    @abstractmethod
    def expander(self, anchor: int, width: int) -> Expand:
        """Drafts `width` children per node below the token at index `anchor`."""

    def draft(self, anchor: int, policy: TreePolicy) -> DraftTree:
        """Returns the tree below the token at index `anchor`, which is not in the caches yet."""
        return draft_level_by_level(
            [int(self.sequence.tokens[anchor])],
            [policy.budget],
            [policy.depth],
            [policy.width],
            self.expander(anchor, policy.width),
            frontier_width=policy.expand_width,
        )[0]

    def children(self, hidden: torch.Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the likeliest tokens and their log-probabilities [n, width] of states [n, H]."""
        slots = self.tables.slots(hidden, width)
        return self.tables.target_ids[slots.rows].numpy(), slots.log_probs.numpy()


class BranchAttention:
    """Attention of a tree's rows, level by level, over a context [S, Hkv, Dh] and their own branch.

    It is called with queries, keys and values of a level, after the level was added to `rows`.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, rows: BranchRows) -> None:
        self.keys, self.values, self.rows = [key], [value], rows

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keys.append(k)
        self.values.append(v)
        mask = branch_mask(self.rows.parents[0], len(q), len(self.keys[0]))
        key, value = torch.cat(self.keys), torch.cat(self.values)
        return attention(q[None], key[None], value[None], mask[None])[0]


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., S, Hq, Dh], [..., L, Hkv, Dh] twice -> [..., S, Hq, Dh]; causal without a mask."""
    q, k, v = (x.transpose(-2, -3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(-2, -3)


def branch_mask(parents: Sequence[int], rows: int, context: int) -> torch.Tensor:
    """Returns a mask bool [rows, context + n] with which the last `rows` of n tree rows attend the
    context and their own branch. Row 0 is the root; `parents` has the parents of the others, -1 for
    the root."""
    tree = torch.eye(len(parents) + 1, dtype=torch.bool)
    for row, parent in enumerate(parents, start=1):
        tree[row] |= tree[parent + 1]
    mask = torch.ones(rows, context + len(tree), dtype=torch.bool)
    mask[:, context:] = tree[-rows:]
    return mask


def evaluate_trees(
    make_drafter: Callable[[SequenceT], Drafter[PolicyT]],
    sequences: Sequence[SequenceT],
    policies: Mapping[str, PolicyT],
    max_rounds: int = 1 << 30,
) -> AcceptanceReport:
    """Returns the acceptance by policy, over at most `max_rounds` rounds per sequence."""
    report = AcceptanceReport()
    for sequence in sequences:
        drafter = make_drafter(sequence)
        tokens = sequence.tokens.tolist()
        for name, policy in policies.items():
            anchor, rounds = max(sequence.prompt_len, 1), 0
            while anchor + 1 < len(tokens) and rounds < max_rounds:
                accepted = accepted_nodes(drafter.draft(anchor, policy), tokens[anchor + 1 :])
                report.total[name].add(accepted)
                report.by_source[sequence.source][name].add(accepted)
                rounds += 1
                anchor += accepted + 1
    return report


def accepted_nodes(tree: DraftTree, truth: Sequence[int]) -> int:
    """Returns how many of the target's next tokens follow a path of the tree."""
    parent, count = -1, 0
    for token in truth:
        child = tree.child_of(parent, token)
        if child is None:
            break
        parent, count = child, count + 1
    return count
