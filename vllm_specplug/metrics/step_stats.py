# SPDX-License-Identifier: Apache-2.0
"""Plain numbers about trees, collected by the runner and sent onwards as a payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PLAIN_REASONS = (
    "batch", "budget", "opted_out", "context", "near_max_len", "no_draft", "invalid_tree",
    "embeds", "no_context",
)  # fmt: skip
"""Why a request decoded a step without a tree: the row limit left none for a fixed budget, no node
paid for its row, the request does not want one, its context is past the limit for drafts, no
position is left for one, the drafter had nothing, its tree broke a rule of trees and was dropped,
its prompt holds embeddings, or the draft's context of a prefix it shares was dropped under load."""

PHASES = ("draft", "verify", "compact")
"""Timed parts of a step: drafting and building trees; the target's forward and the walk; moving the
accepted path's KV together."""

Payload = dict[str, Any]
"""Strings, ints, floats, lists and dicts of them: fit for msgpack, pickle and JSON alike."""


@dataclass
class StepStats:
    """Sums since the last `drain`. A draft is one request's tree in one verification step.

    Everything is counted where it is verified, not where it is drafted: a tree that the scheduler
    cut counts with the nodes that were left, one that it dropped does not count. Mean acceptance
    length = 1 + accepted / drafts follows vLLM.
    """

    num_drafts: int = 0
    # nodes verified, roots excluded
    num_nodes: int = 0
    # [deepest accepted so far] drafts that were accepted to depth index + 1 or deeper
    accepted_by_depth: list[int] = field(default_factory=list)
    # requests' decode steps without a tree, by reason
    plain_steps: dict[str, int] = field(default_factory=dict)
    # nodes of all requests together, one entry per step that had any
    step_nodes: list[int] = field(default_factory=list)
    # milliseconds by phase, one entry per step that had the phase
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    # nodes of the largest tree that the last step with drafts asked for, 0 when none paid
    tree_budget: int | None = None
    # accepted nodes that the adaptive budget expected of its trees, and how many there were
    predicted_accepted: float = 0.0
    predicted_actual: int = 0
    # drafts, nodes and accepted nodes by LoRA adapter, "" for the bare target; where there are any
    by_adapter: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verified draft yields, the target's own token included; 1.0 without drafts."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    def observe_draft(self, num_nodes: int, num_accepted: int, adapter: str | None = None) -> None:
        """One verified tree of `num_nodes` >= 1 nodes, accepted down to depth `num_accepted`.

        Args:
            adapter: name of the request's LoRA adapter, "" for none; None on engines without any.
        """
        assert 0 <= num_accepted <= num_nodes, (num_accepted, num_nodes)
        assert num_nodes > 0, "a request without a tree is a plain step"
        self.num_drafts += 1
        self.num_nodes += num_nodes
        by_depth = self.accepted_by_depth
        if num_accepted > len(by_depth):
            by_depth.extend([0] * (num_accepted - len(by_depth)))
        for index in range(num_accepted):
            by_depth[index] += 1
        if adapter is not None:
            self._add_adapter(adapter, (1, num_nodes, num_accepted))

    def _add_adapter(self, adapter: str, counts: Sequence[int]) -> None:
        before = self.by_adapter.get(adapter, (0, 0, 0))
        self.by_adapter[adapter] = [a + b for a, b in zip(before, counts, strict=True)]

    def observe_step_nodes(self, num_nodes: int) -> None:
        """Nodes that all trees of one step had together."""
        self.step_nodes.append(num_nodes)

    def observe_plain(self, reason: str, count: int = 1) -> None:
        """In one step, `count` requests decoded without a tree."""
        assert reason in PLAIN_REASONS, reason
        if count:
            self.plain_steps[reason] = self.plain_steps.get(reason, 0) + count

    def observe_prediction(self, expected: float, accepted: int) -> None:
        """Accepted nodes of one step, expected by the budget and actual."""
        self.predicted_accepted += expected
        self.predicted_actual += accepted

    def observe_ms(self, phase: str, milliseconds: float) -> None:
        """Wall time of one phase in one step."""
        assert phase in PHASES, phase
        self.milliseconds.setdefault(phase, []).append(milliseconds)

    def to_payload(self) -> Payload | None:
        """The sums as plain data, None when nothing was counted."""
        payload: Payload = {}
        if self.num_drafts:
            payload["drafts"] = self.num_drafts
            payload["nodes"] = self.num_nodes
            payload["by_depth"] = list(self.accepted_by_depth)
        if self.plain_steps:
            payload["plain"] = dict(self.plain_steps)
        if self.step_nodes:
            payload["step_nodes"] = list(self.step_nodes)
        if self.milliseconds:
            payload["ms"] = {phase: list(values) for phase, values in self.milliseconds.items()}
        if self.tree_budget is not None:
            payload["budget"] = self.tree_budget
        if self.predicted_accepted:
            payload["predicted"] = [self.predicted_accepted, self.predicted_actual]
        if self.by_adapter:
            payload["adapters"] = {name: list(c) for name, c in self.by_adapter.items()}
        return payload or None

    def merge(self, payload: Payload | None) -> None:
        """Add what another process, or an earlier step, counted."""
        if not payload:
            return
        self.num_drafts += payload.get("drafts", 0)
        self.num_nodes += payload.get("nodes", 0)
        by_depth = payload.get("by_depth", ())
        if len(by_depth) > len(self.accepted_by_depth):
            missing = len(by_depth) - len(self.accepted_by_depth)
            self.accepted_by_depth.extend([0] * missing)
        for index, count in enumerate(by_depth):
            self.accepted_by_depth[index] += count
        for reason, count in payload.get("plain", {}).items():
            self.plain_steps[reason] = self.plain_steps.get(reason, 0) + count
        self.step_nodes.extend(payload.get("step_nodes", ()))
        for phase, values in payload.get("ms", {}).items():
            self.milliseconds.setdefault(phase, []).extend(values)
        self.tree_budget = payload.get("budget", self.tree_budget)
        expected, accepted = payload.get("predicted", (0.0, 0))
        self.predicted_accepted += expected
        self.predicted_actual += accepted
        for adapter, counts in payload.get("adapters", {}).items():
            self._add_adapter(adapter, counts)

    def reset(self) -> None:
        """Back to zero; the object stays the one that others hold."""
        self.num_drafts = 0
        self.num_nodes = 0
        self.accepted_by_depth = []
        self.plain_steps = {}
        self.step_nodes = []
        self.milliseconds = {}
        self.tree_budget = None
        self.predicted_accepted = 0.0
        self.predicted_actual = 0
        self.by_adapter = {}

    def drain(self) -> Payload | None:
        """`to_payload`, then `reset`."""
        payload = self.to_payload()
        if payload is not None:
            self.reset()
        return payload
