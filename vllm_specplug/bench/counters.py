# SPDX-License-Identifier: Apache-2.0
"""Counters of speculation of vLLM and of this plugin, read from a server's Prometheus page."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_VLLM_PREFIX = "vllm:spec_decode_num_"
_PLUGIN_PREFIX = "specplug:"
_PER_POSITION = "accepted_tokens_per_pos"


@dataclass(frozen=True)
class SpecCounters:
    """Totals since the server started, or their difference over a run.

    The last four are this plugin's and are empty for other methods.
    """

    drafts: float = 0.0
    """Decode steps of single requests with a draft."""
    draft_tokens: float = 0.0
    """Drafted nodes."""
    accepted_tokens: float = 0.0
    """Accepted nodes."""
    accepted_by_depth: dict[int, float] = field(default_factory=dict)
    """Drafts accepted to a depth (1: the first drafted token) or deeper."""
    plain_steps: dict[str, float] = field(default_factory=dict)
    """Decode steps of single requests without a draft, by reason."""
    draft_steps: float = 0.0
    """Engine steps that verified trees."""
    draft_step_nodes: float = 0.0
    """Nodes of all requests in these steps."""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Time by phase: draft, verify, compact."""

    @classmethod
    def parse(cls, text: str) -> SpecCounters:
        """Sums the counters over engines. They are 0 on a server without speculation."""
        totals = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
        by_depth: dict[int, float] = defaultdict(float)
        plain: dict[str, float] = defaultdict(float)
        phases: dict[str, float] = defaultdict(float)
        steps = step_nodes = 0.0
        for family in text_string_to_metric_families(text):
            name = family.name
            for sample in family.samples:
                if name.startswith(_VLLM_PREFIX) and sample.name.endswith("_total"):
                    short = name.removeprefix(_VLLM_PREFIX)
                    if short == _PER_POSITION:
                        by_depth[int(sample.labels["position"]) + 1] += sample.value
                    elif short in totals:
                        totals[short] += sample.value
                elif name == f"{_PLUGIN_PREFIX}plain_steps" and sample.name.endswith("_total"):
                    plain[sample.labels["reason"]] += sample.value
                elif name == f"{_PLUGIN_PREFIX}step_nodes":
                    steps += sample.value if sample.name.endswith("_count") else 0.0
                    step_nodes += sample.value if sample.name.endswith("_sum") else 0.0
                elif name.startswith(_PLUGIN_PREFIX) and sample.name.endswith("_seconds_sum"):
                    phase = name.removeprefix(_PLUGIN_PREFIX).removesuffix("_seconds")
                    phases[phase] += 1e3 * sample.value
        return cls(**totals, accepted_by_depth=by_depth, plain_steps=plain, draft_steps=steps,
                   draft_step_nodes=step_nodes, milliseconds=phases)  # fmt: skip

    def __sub__(self, other: SpecCounters) -> SpecCounters:
        return SpecCounters(
            self.drafts - other.drafts,
            self.draft_tokens - other.draft_tokens,
            self.accepted_tokens - other.accepted_tokens,
            _difference(self.accepted_by_depth, other.accepted_by_depth),
            _difference(self.plain_steps, other.plain_steps),
            self.draft_steps - other.draft_steps,
            self.draft_step_nodes - other.draft_step_nodes,
            _difference(self.milliseconds, other.milliseconds),
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None without drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name, with depths as a list; {} if all are zero."""
        if not self.drafts and not any(self.plain_steps.values()):
            return {}
        depths = [depth for depth, count in self.accepted_by_depth.items() if count]
        return {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "accepted_by_depth": [
                self.accepted_by_depth.get(depth, 0.0)
                for depth in range(1, max(depths, default=0) + 1)
            ],
            "plain_steps": {key: value for key, value in self.plain_steps.items() if value},
            "draft_steps": self.draft_steps,
            "draft_step_nodes": self.draft_step_nodes,
            "milliseconds": self.milliseconds,
        }


def _difference(after: dict[Any, float], before: dict[Any, float]) -> dict[Any, float]:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}
