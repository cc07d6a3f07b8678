# SPDX-License-Identifier: Apache-2.0
"""Drafting simulated on the target's own greedy answers, without a server.

At an anchor, drafts are accepted as far as the answer follows a path of the draft tree. A walk
starts at the first answer token and goes from committed position to committed position, as serving
does. Rounds near the end of an answer can accept only the rest of it.

mean_acceptance_length = 1 + accepted drafts / rounds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

# The token of depths past the end of an answer; no draft equals it.
NO_TOKEN = -1


@dataclass
class Acceptance:
    """Counts of a drafting policy; `by_length`: rounds by the number of accepted drafts."""

    rounds: int = 0
    accepted: int = 0
    by_length: Counter[int] = field(default_factory=Counter)

    def add(self, accepted: int) -> None:
        """Counts one round."""
        self.rounds += 1
        self.accepted += accepted
        self.by_length[accepted] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds; 1.0 without rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    def share_reaching(self, depth: int) -> float:
        """Returns the share of rounds that accepted at least `depth` drafts."""
        reached = sum(count for length, count in self.by_length.items() if length >= depth)
        return reached / self.rounds if self.rounds else 0.0


@dataclass
class AcceptanceReport:
    """Counts by policy ('chain', 'best_first/8', ...), in total and by source, and how often the
    likeliest draft of slot 1, 2, .. was the target's token, over all anchors."""

    total: dict[str, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))
    by_source: dict[str, dict[str, Acceptance]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Acceptance))
    )
    hits: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seen: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def lengths(self) -> dict[str, float]:
        """Returns the mean acceptance length by policy."""
        return {name: counts.mean_acceptance_length for name, counts in self.total.items()}

    def lengths_by_source(self) -> dict[str, dict[str, float]]:
        """Returns the mean acceptance length by source and policy."""
        return {
            source: {name: counts.mean_acceptance_length for name, counts in policies.items()}
            for source, policies in sorted(self.by_source.items())
        }

    def slot_accuracy(self) -> list[float]:
        """Returns the share of anchors whose rank-1 draft is right, by slot."""
        return [float(h / max(s, 1)) for h, s in zip(self.hits, self.seen, strict=True)]

    def facts(self) -> dict[str, Any]:
        """Returns the results for provenance.json."""
        slots = {"slot_accuracy": [round(v, 3) for v in self.slot_accuracy()]}
        return {
            "mean_acceptance_length": rounded(self.lengths()),
            "mean_acceptance_length_by_source": {
                source: rounded(values) for source, values in self.lengths_by_source().items()
            },
            "rounds_reaching_depth": {
                name: [
                    round(counts.share_reaching(depth), 3)
                    for depth in range(1, max(counts.by_length) + 1)
                ]
                for name, counts in self.total.items()
            },
            **(slots if len(self.hits) else {}),
        }

    def summary(self) -> str:
        """Returns the results as one line."""
        lengths = "  ".join(f"{name} {value:.3f}" for name, value in self.lengths().items())
        slots = " ".join(f"{value:.2f}" for value in self.slot_accuracy())
        return f"mean acceptance length {lengths}{f'; slot accuracy {slots}' if slots else ''}"


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Returns the values with three decimals."""
    return {name: round(value, 3) for name, value in values.items()}


@dataclass(frozen=True)
class Slots:
    """The M likeliest tokens of a backbone at the slots of some blocks [..., D].

    `rows` int64 [..., D, M]: draft ids, best first; `logits` float32 [..., D, M]; `log_norm`
    float32 [..., D]: logsumexp over the draft vocabulary.
    """

    rows: torch.Tensor
    logits: torch.Tensor
    log_norm: torch.Tensor

    def __getitem__(self, index: torch.Tensor) -> Slots:
        """Returns some of the blocks."""
        return Slots(self.rows[index], self.logits[index], self.log_norm[index])

    def narrowed(self, candidates: int) -> Slots:
        """Returns a copy with fewer tokens per slot."""
        return Slots(
            self.rows[..., :candidates].contiguous(),
            self.logits[..., :candidates].contiguous(),
            self.log_norm,
        )

    @property
    def log_probs(self) -> torch.Tensor:
        """[..., D, M]."""
        return self.logits - self.log_norm[..., None]


@dataclass(frozen=True)
class DraftedSequence:
    """A sequence, tokens int64 [S], with a backbone's slots [A, D] at its A anchors; row 0 is the
    anchor at the first answer token."""

    tokens: torch.Tensor
    prompt_len: int
    slots: Slots
    source: str = ""

    @property
    def num_anchors(self) -> int:
        """A; at least one token follows each anchor."""
        return len(self.slots.rows)

    @property
    def depth(self) -> int:
        """D, drafted tokens of a block."""
        return self.slots.rows.shape[1]

    def narrowed(self, candidates: int) -> DraftedSequence:
        """Returns a copy with fewer tokens per slot."""
        return replace(self, slots=self.slots.narrowed(candidates))

    def truth(self, anchors: torch.Tensor) -> torch.Tensor:
        """Returns the next D tokens of anchors [R] (rows of `slots`), int64 [R, D], NO_TOKEN after
        the end."""
        at = self.prompt_len + anchors[:, None] + torch.arange(1, self.depth + 1)
        inside = at < len(self.tokens)
        return torch.where(inside, self.tokens[at.clamp_max(len(self.tokens) - 1)], NO_TOKEN)


@dataclass(frozen=True)
class Rounds:
    """One round of R requests: slots [R, D], anchor tokens int64 [R], truth int64 [R, D]."""

    slots: Slots
    anchors: torch.Tensor
    truth: torch.Tensor


# Returns the number of accepted drafts of each round, int64 [R].
Policy = Callable[[Rounds], torch.Tensor]


def rounds_at(sequence: DraftedSequence, anchors: torch.Tensor) -> Rounds:
    """Returns the rounds at some anchors [R] of a sequence."""
    return Rounds(
        sequence.slots[anchors],
        sequence.tokens[sequence.prompt_len + anchors],
        sequence.truth(anchors),
    )


def leading_matches(drafts: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Returns the number of accepted drafts of chains, int64 [R], from drafts and truth [R, D]."""
    return (drafts == truth).long().cumprod(-1).sum(-1)


def walk(
    sequences: Sequence[DraftedSequence], name: str, policy: Policy, report: AcceptanceReport
) -> None:
    """Walks all sequences at once with one policy, and counts into `report`."""
    rows = [0] * len(sequences)
    active = [i for i, s in enumerate(sequences) if s.num_anchors]
    while active:
        parts = [rounds_at(sequences[i], torch.tensor([rows[i]])) for i in active]
        accepted = policy(
            Rounds(
                Slots(
                    torch.cat([p.slots.rows for p in parts]),
                    torch.cat([p.slots.logits for p in parts]),
                    torch.cat([p.slots.log_norm for p in parts]),
                ),
                torch.cat([p.anchors for p in parts]),
                torch.cat([p.truth for p in parts]),
            )
        ).tolist()
        for index, count in zip(active, accepted, strict=True):
            report.total[name].add(count)
            report.by_source[sequences[index].source][name].add(count)
            rows[index] += count + 1
        active = [i for i in active if rows[i] < sequences[i].num_anchors]


def walk_known(
    sequence: DraftedSequence,
    name: str,
    # [A] drafts accepted at every anchor
    accepted: torch.Tensor,
    report: AcceptanceReport,
) -> None:
    """Walks a sequence whose acceptance at every anchor is known."""
    lengths = accepted.tolist()
    row = 0
    while row < len(lengths):
        report.total[name].add(lengths[row])
        report.by_source[sequence.source][name].add(lengths[row])
        row += lengths[row] + 1
