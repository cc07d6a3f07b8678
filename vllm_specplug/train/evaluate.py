# SPDX-License-Identifier: Apache-2.0
"""Held-out acceptance estimate of a block head, without a server.

The target's own greedy answer stands for its choices: at an anchor, the drafts are accepted as far
as the answer follows a path of the draft tree. The walk starts at the first answer token and goes
from committed position to committed position, as serving does. Rounds near the end of an answer
count with what is left to accept.

mean_acceptance_length = 1 + accepted drafts / rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_specplug.models.block_head import BlockHead
from vllm_specplug.train.blocks import anchor_range, pack_blocks, run_blocks
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.tree import build_tree


@dataclass
class Acceptance:
    """Counts of one drafting policy."""

    rounds: int = 0
    accepted: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds; 1.0 where nothing was drafted."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0


@dataclass
class AcceptanceReport:
    """Counts by policy ('chain', 'best_first/8', ...), in all and by source, and how often the
    draft's first choice at slot 1, 2, .. was the target's token (over all anchors)."""

    total: dict[str, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))
    by_source: dict[str, dict[str, Acceptance]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Acceptance))
    )
    hits: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seen: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def lengths(self) -> dict[str, float]:
        """Mean acceptance length by policy."""
        return {name: counts.mean_acceptance_length for name, counts in self.total.items()}

    def lengths_by_source(self) -> dict[str, dict[str, float]]:
        """Mean acceptance length by source and policy."""
        return {
            source: {name: counts.mean_acceptance_length for name, counts in policies.items()}
            for source, policies in sorted(self.by_source.items())
        }

    def slot_accuracy(self) -> list[float]:
        """Share of anchors whose rank-1 draft at each slot is right."""
        return [float(h / max(s, 1)) for h, s in zip(self.hits, self.seen, strict=True)]


@torch.no_grad()
def draft_candidates(
    head: BlockHead,
    sequence: FeatureSequence,
    embed_tokens: torch.Tensor,
    lm_head: torch.Tensor,
    target_ids: torch.Tensor,
    width: int,
    autocast: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Top-`width` candidates at every anchor of a sequence.

    Args:
        embed_tokens: [V, H] of the target. lm_head: [V', H] draft rows of the target's LM head.
        target_ids: int64 [V'], the target token of each draft id.

    Returns:
        token ids int64 and log-probabilities float32, each [A, D, width].
    """
    anchors = torch.tensor(list(anchor_range(sequence)), dtype=torch.int64)
    depth = head.config.num_draft_tokens
    device = lm_head.device
    batch = pack_blocks([sequence], [anchors], head.config.block_size, 64).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        hidden = run_blocks(head, batch, embed_tokens)
    logits = (hidden.to(lm_head.dtype) @ lm_head.t()).float()
    values, indices = logits.topk(width, dim=-1)
    log_probs = values - torch.logsumexp(logits, -1, keepdim=True)
    shape = (len(anchors), depth, width)
    return (
        target_ids.to(device)[indices].view(shape).cpu().numpy(),
        log_probs.view(shape).cpu().numpy(),
    )


def matched_nodes(
    token_ids: np.ndarray,
    log_probs: np.ndarray,
    truth: Sequence[int],
    budget: int,
    builder: str = "best_first",
) -> list[int]:
    """Indices of the tree nodes on the true path, from the root down.

    token_ids, log_probs [D, W]; truth: the target's next tokens.
    """
    tree = build_tree(
        builder,
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


def evaluate_head(
    head: BlockHead,
    sequences: Iterable[FeatureSequence],
    embed_tokens: torch.Tensor,
    lm_head: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    budgets: Sequence[int] = (8, 16, 32),
    builders: Sequence[str] = ("best_first",),
    width: int = 16,
    autocast: bool = True,
) -> AcceptanceReport:
    """Acceptance of chains and trees on the target's own (greedy) answers."""
    was_training = head.training
    head.eval()
    report = AcceptanceReport()
    depth = head.config.num_draft_tokens
    report.hits, report.seen = np.zeros(depth), np.zeros(depth)
    for sequence in sequences:
        start = sequence.prompt_len
        if len(sequence.tokens) - 1 <= start:
            continue
        ids, log_probs = draft_candidates(
            head, sequence, embed_tokens, lm_head, target_ids, width, autocast
        )
        tokens = sequence.tokens.numpy()
        for slot in range(1, depth + 1):
            truth = tokens[start + slot :]
            report.hits[slot - 1] += (ids[: len(truth), slot - 1, 0] == truth).sum()
            report.seen[slot - 1] += len(truth)

        def chain_length(
            anchor: int, ids: np.ndarray = ids, tokens: np.ndarray = tokens, start: int = start
        ) -> int:
            truth = tokens[anchor + 1 : anchor + 1 + depth]
            match = ids[anchor - start, : len(truth), 0] == truth
            return len(match) if match.all() else int(match.argmin())

        _walk(report, "chain", sequence, chain_length)
        for builder in builders:
            # A smaller best-first tree is a prefix of a larger one; other builders are built anew.
            shared: dict[int, list[int]] = {}
            for budget in budgets:
                size = max(budgets) if builder == "best_first" else budget
                known = shared if builder == "best_first" else {}

                def tree_length(
                    anchor: int,
                    ids: np.ndarray = ids,
                    tokens: np.ndarray = tokens,
                    logp: np.ndarray = log_probs,
                    start: int = start,
                    size: int = size,
                    budget: int = budget,
                    builder: str = builder,
                    known: dict[int, list[int]] = known,
                ) -> int:
                    if anchor not in known:
                        truth = tokens[anchor + 1 : anchor + 1 + depth].tolist()
                        known[anchor] = matched_nodes(
                            ids[anchor - start], logp[anchor - start], truth, size, builder
                        )
                    return sum(node < budget for node in known[anchor])

                _walk(report, f"{builder}/{budget}", sequence, tree_length)
    head.train(was_training)
    return report


def _walk(report: AcceptanceReport, policy: str, sequence: FeatureSequence, accepted_at) -> None:  # type: ignore[no-untyped-def]
    anchor, last = sequence.prompt_len, len(sequence.tokens) - 1
    counters = (report.total[policy], report.by_source[sequence.source][policy])
    while anchor < last:
        accepted = accepted_at(anchor)
        for counter in counters:
            counter.rounds += 1
            counter.accepted += accepted
        anchor += accepted + 1
