# SPDX-License-Identifier: Apache-2.0
"""vLLM's counters of speculation, read from a server's Prometheus page."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class SpecCounters:
    """Totals since the server started, or their difference over a run."""

    drafts: float = 0.0
    """Decode steps of single requests with a draft."""
    accepted_tokens: float = 0.0
    """Accepted nodes."""
    accepted_by_depth: dict[int, float] = field(default_factory=dict)
    """Drafts accepted to a depth (1: the first drafted token) or deeper."""

    @classmethod
    def parse(cls, text: str) -> SpecCounters:
        """Sums the counters over engines. They are 0 on a server without speculation."""
        totals = {"drafts": 0.0, "accepted_tokens": 0.0}
        by_depth: dict[int, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            name = family.name.removeprefix(_PREFIX)
            if name == family.name:
                continue
            for sample in family.samples:
                if not sample.name.endswith("_total"):
                    continue
                if name == "accepted_tokens_per_pos":
                    by_depth[int(sample.labels["position"]) + 1] += sample.value
                elif name in totals:
                    totals[name] += sample.value
        return cls(**totals, accepted_by_depth=by_depth)

    def __sub__(self, other: SpecCounters) -> SpecCounters:
        by_depth = {
            depth: count - other.accepted_by_depth.get(depth, 0.0)
            for depth, count in self.accepted_by_depth.items()
        }
        return SpecCounters(
            self.drafts - other.drafts, self.accepted_tokens - other.accepted_tokens, by_depth
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None without drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else None
