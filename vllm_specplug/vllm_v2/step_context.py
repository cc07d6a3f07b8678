# SPDX-License-Identifier: Apache-2.0
"""The running step, shared by the runner, its model state, its sampler and its speculator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplug.tree.step_trees import CommitMap, StepTrees, Walk, committed_rows
from vllm_specplug.vllm_attention.state_rows import StateStep


@dataclass(frozen=True)
class StepRecord:
    """The part of a step that is kept until the host has read its walk."""

    # marks of the step clock
    walked: Any
    compacted: Any
    # `DraftPlanner.running`
    running: Any


class StepContext:
    """The running step. `begin` resets it; the runner and its parts fill it in."""

    def __init__(self) -> None:
        self.draft_group = 0
        """KV cache group of the draft layers."""
        self.warmup_states: StateStep | None = None
        """The trees of a dummy forward in layers with a recurrent state; calibration sets it."""
        self.has_dummy_rows = False
        """Whether calibration runs a dummy forward, whose rows must cost what real rows cost."""
        self.begin()

    def begin(self) -> None:
        """Starts a step, or a dummy forward, which has no trees."""
        self.trees: StepTrees | None = None
        """None in a step without drafts."""
        self.walk: Walk | None = None
        """None in a step without drafts, and before the walk."""
        self.states: StateStep | None = None
        """The step's trees in layers with a recurrent state, until the walk."""
        # [groups, T] int64, linear
        self.slots: torch.Tensor | None = None
        self.logits_counts: np.ndarray | None = None
        """Number of logits rows per request. Set by the step's inputs, read by its adapters; else
        None."""
        self.adapters: tuple[tuple[int, ...], set[Any]] = ((), set())
        """LoRA ids by request, and vLLM's LoRA requests; empty on an engine without adapters."""
        self.tree_nodes: Callable[[], dict[str, int]] | None = None
        """See `TreeSpeculator.tree_nodes`. None in a step without drafts, and if the scheduler
        waits for trees."""
        # Marks of the clock: after the walk and after compaction.
        self.walked: Any = None
        self.compacted: Any = None

    def committed(self, input_batch: Any) -> CommitMap:
        """Returns the rows whose tokens are final. Call it after the walk."""
        assert self.slots is not None
        num_tokens = input_batch.num_tokens
        slots = self.slots[self.draft_group, :num_tokens]
        positions = input_batch.positions[:num_tokens]
        if self.walk is not None:
            assert self.trees is not None
            return committed_rows(self.trees, self.walk, slots, positions)
        rows = torch.arange(num_tokens, device=slots.device)
        return CommitMap(rows, slots, positions, input_batch.logits_indices)

    def record(self, running: Any) -> StepRecord:
        """Returns the record from which the planner learns, perhaps later.

        `running` is `DraftPlanner.running`.
        """
        return StepRecord(self.walked, self.compacted, running)
