# SPDX-License-Identifier: Apache-2.0
"""The `specplug:` metrics of one front end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_specplug.metrics.step_stats import PHASES, PLAIN_REASONS, Payload

NAMESPACE = "specplug:"

_SECONDS_BUCKETS = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5
)  # fmt: skip
_NODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

# Counters by name: what they count, and their labels besides the exporter's.
_COUNTERS: dict[str, tuple[str, ...]] = {
    "drafts": ("Draft trees verified.",),
    "draft_nodes": ("Draft tree nodes verified, roots excluded.",),
    "accepted_tokens": (
        "Draft tokens accepted, by depth in the tree; the sum over depths is all of them.",
        "depth",
    ),
    "plain_steps": ("Decode steps of single requests without a tree, by reason.", "reason"),
    "predicted_accepted_tokens": ("Accepted draft tokens, as the adaptive budget predicted.",),
    "predicted_actual_tokens": ("Accepted draft tokens of the trees with a prediction.",),
}
_LABELLED = {name for name, (_, *own) in _COUNTERS.items() if own}
_HISTOGRAMS = {
    "step_nodes": ("Draft tree nodes per step, of all requests.", _NODE_BUCKETS),
    "draft_seconds": ("Seconds per step for drafting and building trees.", _SECONDS_BUCKETS),
    "verify_seconds": (
        "Seconds per step for the target's forward pass over tree rows and the walk.",
        _SECONDS_BUCKETS,
    ),
    "compact_seconds": (
        "Seconds per step for compacting the KV of accepted paths.",
        _SECONDS_BUCKETS,
    ),
}


@cache
def _families(labelnames: tuple[str, ...], registry: CollectorRegistry) -> dict[str, Any]:
    """Returns the metric families of a registry, which accepts each name only once."""
    families: dict[str, Any] = {
        name: Counter(NAMESPACE + name, text, [*labelnames, *own], registry=registry)
        for name, (text, *own) in _COUNTERS.items()
    }
    for name, (text, buckets) in _HISTOGRAMS.items():
        families[name] = Histogram(
            NAMESPACE + name, text, labelnames, buckets=buckets, registry=registry
        )
    families["tree_budget"] = Gauge(
        NAMESPACE + "tree_budget",
        "Nodes of the largest tree that the last step with drafts requested; 0 for no drafts.",
        labelnames,
        multiprocess_mode="mostrecent",
        registry=registry,
    )
    return families


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
        self._families = _families(tuple(labels), REGISTRY if registry is None else registry)
        self._values = tuple(labels.values())
        # Create series now, so that their rates are 0 and not empty.
        for name in self._families.keys() - _LABELLED:
            self._metric(name)
        self._metric("accepted_tokens", "1")
        for reason in PLAIN_REASONS:
            self._metric("plain_steps", reason)

    def _metric(self, name: str, *labels: str) -> Any:
        return self._families[name].labels(*self._values, *labels)

    def observe(self, payload: Payload | None) -> None:
        """Adds one payload. Unknown keys and labels are ignored."""
        if not payload:
            return
        if drafts := payload.get("num_drafts"):
            self._metric("drafts").inc(drafts)
            self._metric("draft_nodes").inc(payload["num_nodes"])
            for depth, count in enumerate(payload.get("accepted_by_depth", ()), 1):
                self._metric("accepted_tokens", str(depth)).inc(count)
        for reason, count in payload.get("plain_steps", {}).items():
            if reason in PLAIN_REASONS:
                self._metric("plain_steps", reason).inc(count)
        for num_nodes in payload.get("step_nodes", ()):
            self._metric("step_nodes").observe(num_nodes)
        for phase, values in payload.get("milliseconds", {}).items():
            if phase in PHASES:
                for milliseconds in values:
                    self._metric(f"{phase}_seconds").observe(milliseconds / 1e3)
        if (budget := payload.get("tree_budget")) is not None:
            self._metric("tree_budget").set(budget)
        for name in ("accepted", "actual"):
            self._metric(f"predicted_{name}_tokens").inc(payload.get(f"predicted_{name}", 0))
