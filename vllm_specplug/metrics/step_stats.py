# SPDX-License-Identifier: Apache-2.0
"""Statistics of a worker's steps, and the payload that carries them to the front end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

PLAIN_REASONS = (
    "batch", "budget", "opted_out", "near_max_len", "no_draft", "invalid_tree",
    "embeds", "no_context",
)  # fmt: skip
"""Reasons why a request decoded a step without a tree, in this order: the row limit left no row for
a fixed budget, no node was worth its row, the request opted out, no position is left before the
maximum length, the drafter proposed nothing, its tree was malformed and was dropped, its prompt
holds embeddings, its draft context was dropped under load."""

PHASES = ("draft", "verify", "compact")
"""Timed phases of a step: drafting and building trees; the target's forward pass and the walk;
compacting the KV of accepted paths."""

Payload = dict[str, Any]
"""Strings, ints, floats, lists and dicts, for msgpack, pickle and JSON."""


@dataclass
class StepStats:
    """Sums since the last `drain`. A draft is one request's tree in one verification step.

    Trees are counted when they are verified: a tree that the scheduler cut counts with its
    remaining nodes, and one that it dropped does not count.
    """

    num_drafts: int = 0
    # verified nodes without roots
    num_nodes: int = 0
    # [deepest accepted node] drafts that were accepted to depth index + 1 or deeper
    accepted_by_depth: list[int] = field(default_factory=list)
    # decode steps of single requests without a tree, by reason
    plain_steps: dict[str, int] = field(default_factory=dict)
    # nodes of all requests, one entry per step with trees
    step_nodes: list[int] = field(default_factory=list)
    # milliseconds by phase, one entry per step with that phase
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    # nodes of the largest tree that the last step with drafts requested; 0 if none was worth it
    tree_budget: int | None = None
    # accepted nodes, as the adaptive budget predicted and as counted
    predicted_accepted: float = 0.0
    predicted_actual: int = 0

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts, as in vLLM; 1.0 without drafts."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    def observe_draft(self, num_nodes: int, num_accepted: int) -> None:
        """Counts a verified tree of at least one node, accepted down to depth `num_accepted`."""
        assert 0 <= num_accepted <= num_nodes, (num_accepted, num_nodes)
        assert num_nodes > 0, "a request without a tree is a plain step"
        self.num_drafts += 1
        self.num_nodes += num_nodes
        self.accepted_by_depth = _added(self.accepted_by_depth, [1] * num_accepted)

    def observe_plain(self, reason: str, count: int = 1) -> None:
        """Counts `count` requests that decoded one step without a tree."""
        assert reason in PLAIN_REASONS, reason
        if count:
            self.plain_steps[reason] = self.plain_steps.get(reason, 0) + count

    def observe_prediction(self, expected: float, accepted: int) -> None:
        """Adds the accepted nodes of one step, as the budget expected and as counted."""
        self.predicted_accepted += expected
        self.predicted_actual += accepted

    def observe_ms(self, phase: str, milliseconds: float) -> None:
        """Records the wall time of one phase in one step."""
        assert phase in PHASES, phase
        self.milliseconds.setdefault(phase, []).append(milliseconds)

    def drain(self) -> Payload | None:
        """Returns the sums by field, None if there are none, and sets them to zero."""
        unused, values = vars(StepStats()), vars(self)
        payload = {name: values[name] for name in unused if values[name] != unused[name]}
        # Others hold this object, so its fields are replaced.
        vars(self).update(unused)
        return payload or None

    def merge(self, payload: Payload) -> None:
        """Adds the sums of a payload."""
        self.num_drafts += payload.get("num_drafts", 0)
        self.num_nodes += payload.get("num_nodes", 0)
        by_depth = payload.get("accepted_by_depth", ())
        self.accepted_by_depth = _added(self.accepted_by_depth, by_depth)
        for reason, count in payload.get("plain_steps", {}).items():
            self.observe_plain(reason, count)
        self.step_nodes.extend(payload.get("step_nodes", ()))
        for phase, values in payload.get("milliseconds", {}).items():
            self.milliseconds.setdefault(phase, []).extend(values)
        self.tree_budget = payload.get("tree_budget", self.tree_budget)
        self.predicted_accepted += payload.get("predicted_accepted", 0.0)
        self.predicted_actual += payload.get("predicted_actual", 0)


def _added(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
