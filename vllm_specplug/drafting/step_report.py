# SPDX-License-Identifier: Apache-2.0
"""The report that a worker attaches to vLLM's output of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_specplug.drafting.reserved_rows import ReservedRows

REPORT_ATTRIBUTE = "specplug_report"
"""Attribute of vLLM's `ModelRunnerOutput` that holds a `StepReport`."""


@dataclass
class StepReport:
    """What a worker sends to the engine core with a step's output.

    Args:
        stats: statistics for /metrics, if there are any.
        reserved: the rows to reserve, for a scheduler that works ahead.
        drafts: vLLM's `DraftTokenIds` for the next step, for a scheduler that waits.
        tree_nodes: number of nodes of each verified tree by request, where the scheduler works
            ahead. Known once the output is on the host.
    """

    stats: dict[str, Any] | None
    reserved: ReservedRows | None
    drafts: Any = None
    tree_nodes: dict[str, int] | None = None
