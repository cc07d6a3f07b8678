# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance estimate of a block head, as a chain and as trees (see `walk`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.blocks import anchor_range, pack_blocks, run_blocks
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.trainer import to_device
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import (
    NO_TOKEN,
    AcceptanceReport,
    DraftedSequence,
    Policy,
    Rounds,
    leading_matches,
    rounds_at,
    walk,
)
from vllm_specplug.tree import build_tree


@torch.no_grad()
def draft_sequences(
    head: BlockHead,
    sequences: Iterable[FeatureSequence],
    tables: DraftTables,
    candidates: int,
    autocast: bool = True,
) -> Iterator[DraftedSequence]:
    """Yields the drafts at every anchor of every sequence; sequences without an anchor are skipped.

    Args:
        candidates: tokens kept per slot; 0 for the whole draft vocabulary.
    """
    depth = head.config.num_draft_tokens
    device = tables.embed_tokens.device
    for sequence in sequences:
        anchors = torch.tensor(list(anchor_range(sequence)), dtype=torch.int64)
        if not len(anchors):
            continue
        batch = pack_blocks(
            [sequence], [anchors], head.config.block_size, 64, head.config.first_slot
        )
        batch = to_device(batch, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            hidden = run_blocks(head, batch, tables.embed_tokens)
        slots = tables.slots(hidden.view(len(anchors), depth, -1), candidates)
        slots = to_device(slots, torch.device("cpu"))
        yield DraftedSequence(sequence.tokens, sequence.prompt_len, slots, sequence.source)


def chain_policy(tables: DraftTables) -> Policy:
    """Returns the policy of the backbone's chain: the most likely token of every slot."""

    def accepted(rounds: Rounds) -> torch.Tensor:
        return leading_matches(tables.target_ids[rounds.slots.rows[..., 0]], rounds.truth)

    return accepted


def tree_policy(tables: DraftTables, budget: int, width: int) -> Policy:
    """Returns the policy of trees of `budget` nodes from the slots' distributions."""

    def accepted(rounds: Rounds) -> torch.Tensor:
        slots = rounds.slots.narrowed(width)
        ids, log_probs = tables.target_ids[slots.rows].numpy(), slots.log_probs.numpy()
        counts = [
            len(matched_nodes(ids[r], log_probs[r], rounds.truth[r].tolist(), budget))
            for r in range(len(ids))
        ]
        return torch.tensor(counts)

    return accepted


def matched_nodes(
    token_ids: np.ndarray,
    log_probs: np.ndarray,
    truth: Sequence[int],
    budget: int,
) -> list[int]:
    """Returns the indices of the tree nodes on the true path, from the root down.

    `token_ids` and `log_probs` are [D, W]; `truth` are the target's next tokens.
    """
    tree = build_tree(
        token_ids,
        log_probs,
        budget,
        tree_width=token_ids.shape[1],
        tree_depth=token_ids.shape[0],
    )
    path: list[int] = []
    parent = -1
    for token in truth[: token_ids.shape[0]]:
        child = tree.child_of(parent, int(token))
        if child is None:
            break
        path.append(child)
        parent = child
    return path


@torch.no_grad()
def count_slots(
    drafted: Sequence[DraftedSequence], tables: DraftTables, report: AcceptanceReport
) -> None:
    """Counts rank-1 hits of every slot at every anchor into `report`."""
    for sequence in drafted:
        if not len(report.hits):
            report.hits, report.seen = np.zeros(sequence.depth), np.zeros(sequence.depth)
        rounds = rounds_at(sequence, torch.arange(sequence.num_anchors))
        drafts = tables.target_ids[rounds.slots.rows[..., 0]]
        report.hits += (drafts == rounds.truth).sum(0).numpy()
        report.seen += (rounds.truth != NO_TOKEN).sum(0).numpy()


@torch.no_grad()
def evaluate_head(
    head: BlockHead,
    sequences: Iterable[FeatureSequence],
    tables: DraftTables,
    *,
    budgets: Sequence[int] = (8, 16, 32),
    width: int = 16,
) -> AcceptanceReport:
    """Returns the acceptance of chains and trees on the target's greedy answers."""
    drafted = list(draft_sequences(head, sequences, tables, width))
    report = AcceptanceReport()
    count_slots(drafted, tables, report)
    add_policies(drafted, tables, budgets, width, report)
    return report


def add_policies(
    drafted: Sequence[DraftedSequence],
    tables: DraftTables,
    budgets: Sequence[int],
    width: int,
    report: AcceptanceReport,
) -> None:
    """Walks the chain ('chain') and the trees ('best_first/budget') into `report`."""
    walk(drafted, "chain", chain_policy(tables), report)
    for budget in budgets:
        walk(drafted, f"best_first/{budget}", tree_policy(tables, budget, width), report)
