# SPDX-License-Identifier: Apache-2.0
"""vLLM's speculative counters, read from a server's Prometheus page."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class SpecCounters:
    """Totals since the server started, or their difference over a run."""

    drafts: float = 0.0
    """Requests-times-steps that had a draft."""
    draft_tokens: float = 0.0
    """Drafted nodes."""
    accepted_tokens: float = 0.0
    """Accepted nodes."""

    @classmethod
    def parse(cls, text: str) -> SpecCounters:
        """Sums the counters over engines; zero when the server has none (no speculation)."""
        totals = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
        for family in text_string_to_metric_families(text):
            name = family.name.removeprefix(_PREFIX)
            if family.name.startswith(_PREFIX) and name in totals:
                totals[name] += sum(
                    sample.value for sample in family.samples if sample.name.endswith("_total")
                )
        return cls(**totals)

    def __sub__(self, other: SpecCounters) -> SpecCounters:
        return SpecCounters(
            self.drafts - other.drafts,
            self.draft_tokens - other.draft_tokens,
            self.accepted_tokens - other.accepted_tokens,
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None when nothing was drafted."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else None
