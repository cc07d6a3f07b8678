# SPDX-License-Identifier: Apache-2.0
"""The acceptance of a head's chains on held-out answers, estimated without a server.

A chain ends at its first wrong draft. So its acceptance depends only on drafts whose predecessors
are right, and an objective computes these for all anchors of an answer at once. A walk starts at
the first answer token and goes from committed position to committed position, as serving does.
Rounds near the end of an answer can accept only the rest of it.

Trees accept more; `specplug evaluate` measures them in a server.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F


@dataclass
class ChainAcceptance:
    """Rounds by source and number of accepted drafts, and how often the draft of slot 1, 2, .. was
    right, over all anchors. Mean acceptance length = 1 + accepted / rounds."""

    rounds: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    right: Counter[int] = field(default_factory=Counter)
    seen: Counter[int] = field(default_factory=Counter)

    def add(self, drafts: torch.Tensor, tokens: torch.Tensor, start: int, source: str) -> None:
        """Counts the chains of one sequence.

        Args:
            drafts: int64 [A, D] of the anchors at indices `start`, `start` + 1, ..
            tokens: int64 [S], the tokens of the sequence.
        """
        count, depth = drafts.shape
        # No draft equals the token of a depth past the end.
        padded = F.pad(tokens, (0, depth), value=-1)
        truth = padded[start + 1 :].unfold(0, depth, 1)[:count]
        is_right = drafts == truth
        self.right.update(dict(enumerate(is_right.sum(0).tolist())))
        self.seen.update(dict(enumerate((truth >= 0).sum(0).tolist())))
        accepted = is_right.long().cumprod(-1).sum(-1).tolist()
        row = 0
        while row < count:
            self.rounds[source][accepted[row]] += 1
            row += accepted[row] + 1

    def facts(self) -> dict[str, Any]:
        """Returns the results for provenance.json."""
        total = sum(self.rounds.values(), Counter())
        sources = sorted(self.rounds.items())
        reaching = [
            sum(count for length, count in total.items() if length >= depth) / total.total()
            for depth in range(1, max(total, default=0) + 1)
        ]
        return {
            "mean_acceptance_length": {"chain": _mean_length(total)},
            "mean_acceptance_length_by_source": {
                source: {"chain": _mean_length(rounds)} for source, rounds in sources
            },
            "rounds_reaching_depth": {"chain": [round(share, 3) for share in reaching]},
            "slot_accuracy": [
                round(right / max(self.seen[slot], 1), 3) for slot, right in self.right.items()
            ],
        }

    def curves(self) -> dict[str, float]:
        """Returns the mean acceptance length of all answers and by the first part of their
        source."""
        parts: dict[str, Counter[int]] = defaultdict(Counter)
        for source, found in sorted(self.rounds.items()):
            for name in ("all", source.split("/")[0]):
                parts[name].update(found)
        return {name: _mean_length(found) for name, found in parts.items()}

    def summary(self) -> str:
        """Returns the results as one line."""
        facts = self.facts()
        slots = " ".join(f"{value:.2f}" for value in facts["slot_accuracy"])
        length = facts["mean_acceptance_length"]["chain"]
        return f"mean acceptance length of chains {length:.3f}; slot accuracy {slots}"


def _mean_length(rounds: Counter[int]) -> float:
    accepted = sum(length * count for length, count in rounds.items())
    return round(1 + accepted / max(rounds.total(), 1), 3)
