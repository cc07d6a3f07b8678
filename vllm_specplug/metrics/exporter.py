# SPDX-License-Identifier: Apache-2.0
"""The `specplug:` metrics of one front end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_specplug.metrics.step_stats import PHASES, PLAIN_REASONS, Payload

NAMESPACE = "specplug:"

_SECONDS_BUCKETS = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5
)  # fmt: skip
_NODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

# Labels of requests without a LoRA adapter, and of adapters past the first `MAX_ADAPTERS`: a server
# may load any number of adapters, and Prometheus keeps a time series for each name.
BARE_TARGET, OTHER_ADAPTERS = "(none)", "(others)"
MAX_ADAPTERS = 64

_PHASE_HELP = {
    "draft": "Seconds per step for drafting and building trees.",
    "verify": "Seconds per step for the target's forward pass over tree rows and the walk.",
    "compact": "Seconds per step for compacting the KV of accepted paths.",
}


@dataclass(frozen=True)
class _Families:
    """Metric families of one registry, which accepts each name only once."""

    drafts: Counter
    nodes: Counter
    accepted: Counter
    plain_steps: Counter
    step_nodes: Histogram
    seconds: Mapping[str, Histogram]
    tree_budget: Gauge
    predicted: Counter
    predicted_actual: Counter
    # drafts, nodes and accepted nodes by adapter
    by_adapter: tuple[Counter, Counter, Counter]


@cache
def _families(labelnames: tuple[str, ...], registry: CollectorRegistry) -> _Families:
    def counter(name: str, documentation: str, *extra: str) -> Counter:
        return Counter(NAMESPACE + name, documentation, [*labelnames, *extra], registry=registry)

    def histogram(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            NAMESPACE + name, documentation, labelnames, buckets=buckets, registry=registry
        )

    return _Families(
        drafts=counter("drafts", "Draft trees verified."),
        nodes=counter("draft_nodes", "Draft tree nodes verified, roots excluded."),
        accepted=counter(
            "accepted_tokens",
            "Draft tokens accepted, by depth in the tree; the sum over depths is all of them.",
            "depth",
        ),
        plain_steps=counter(
            "plain_steps", "Decode steps of single requests without a tree, by reason.", "reason"
        ),
        step_nodes=histogram(
            "step_nodes", "Draft tree nodes per step, of all requests.", _NODE_BUCKETS
        ),
        seconds={
            phase: histogram(f"{phase}_seconds", _PHASE_HELP[phase], _SECONDS_BUCKETS)
            for phase in PHASES
        },
        predicted=counter(
            "predicted_accepted_tokens", "Accepted draft tokens, as the adaptive budget predicted."
        ),
        predicted_actual=counter(
            "predicted_actual_tokens", "Accepted draft tokens of the trees with a prediction."
        ),
        by_adapter=(
            counter("adapter_drafts", "Draft trees verified, by LoRA adapter.", "adapter"),
            counter("adapter_draft_nodes", "Draft tree nodes verified, by adapter.", "adapter"),
            counter("adapter_accepted_tokens", "Draft tokens accepted, by adapter.", "adapter"),
        ),
        tree_budget=Gauge(
            NAMESPACE + "tree_budget",
            "Nodes of the largest tree that the last step with drafts requested; 0 for no drafts.",
            labelnames,
            multiprocess_mode="mostrecent",
            registry=registry,
        ),
    )


class PrometheusExporter:
    """Turns payloads of `StepStats` into Prometheus metrics.

    docs/operations.md lists them.

    Exporters of one registry share the metric families, so that several engines in one process add
    their labels. Their label names must be the same.
    """

    def __init__(
        self, labels: Mapping[str, str], registry: CollectorRegistry | None = None
    ) -> None:
        """
        Args:
            labels: labels of every metric, for vLLM `model_name` and `engine`.
            registry: default: that of the process.
        """
        families = _families(tuple(labels), REGISTRY if registry is None else registry)
        values = tuple(labels.values())
        self._values = values
        self._accepted_family = families.accepted
        # The first depth exists from the start: where no draft is ever accepted, its rate is 0.
        self._accepted = [families.accepted.labels(*values, "1")]
        self._drafts = families.drafts.labels(*values)
        self._nodes = families.nodes.labels(*values)
        # All reasons exist from the start, so that a rate over them is never empty.
        self._plain = {r: families.plain_steps.labels(*values, r) for r in PLAIN_REASONS}
        self._step_nodes = families.step_nodes.labels(*values)
        self._seconds = {p: h.labels(*values) for p, h in families.seconds.items()}
        self._tree_budget = families.tree_budget.labels(*values)
        self._predicted = families.predicted.labels(*values)
        self._predicted_actual = families.predicted_actual.labels(*values)
        self._adapter_families = families.by_adapter
        self._adapters: dict[str, tuple[Counter, ...]] = {}

    def observe(self, payload: Payload | None) -> None:
        """Adds one payload. Unknown keys and labels are ignored."""
        if not payload:
            return
        if drafts := payload.get("drafts"):
            self._drafts.inc(drafts)
            self._nodes.inc(payload["nodes"])
            for index, count in enumerate(payload["by_depth"]):
                if index == len(self._accepted):
                    child = self._accepted_family.labels(*self._values, str(index + 1))
                    self._accepted.append(child)
                self._accepted[index].inc(count)
        for reason, count in payload.get("plain", {}).items():
            if (plain := self._plain.get(reason)) is not None:
                plain.inc(count)
        for num_nodes in payload.get("step_nodes", ()):
            self._step_nodes.observe(num_nodes)
        for phase, values in payload.get("ms", {}).items():
            if (histogram := self._seconds.get(phase)) is not None:
                for milliseconds in values:
                    histogram.observe(milliseconds / 1e3)
        if (budget := payload.get("budget")) is not None:
            self._tree_budget.set(budget)
        if (predicted := payload.get("predicted")) is not None:
            self._predicted.inc(predicted[0])
            self._predicted_actual.inc(predicted[1])
        for name, counts in payload.get("adapters", {}).items():
            for counter, count in zip(self._adapter_counters(name), counts, strict=True):
                counter.inc(count)

    def _adapter_counters(self, name: str) -> tuple[Counter, ...]:
        """Returns the counters of an adapter, "" for none; new adapters past the limit share one
        label."""
        label = name or BARE_TARGET
        if label not in self._adapters and name and len(self._adapters) >= MAX_ADAPTERS:
            label = OTHER_ADAPTERS
        if label not in self._adapters:
            self._adapters[label] = tuple(
                family.labels(*self._values, label) for family in self._adapter_families
            )
        return self._adapters[label]
