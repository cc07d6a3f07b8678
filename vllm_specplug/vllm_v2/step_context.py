# SPDX-License-Identifier: Apache-2.0
"""What the runner, its model state, its sampler and its speculator know of the running step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplug.tree.step_trees import CommitMap, StepTrees, Walk, committed_rows
from vllm_specplug.vllm_attention.state_rows import StateStep


@dataclass(frozen=True)
class StepRecord:
    """What is kept of a step until the host has read its walk."""

    # marks of the clock
    walked: Any
    compacted: Any
    # `DraftPlanner.running`
    running: Any
    # LoRA adapter of each request, "" for none; empty on an engine without any
    adapters: tuple[str, ...] = ()


class StepContext:
    """The running step. `begin` starts one; whoever knows more of it fills it in."""

    def __init__(self) -> None:
        self.draft_group = 0
        """KV cache group of the drafter's own layers."""
        self.warmup_states: StateStep | None = None
        """What trees of a forward of dummies would do to recurrent states; calibration sets it."""
        self.begin()

    def begin(self) -> None:
        """A step starts, or a forward of dummies, which has no trees."""
        self.trees: StepTrees | None = None
        """None in a step without drafts."""
        self.walk: Walk | None = None
        """None in a step without drafts, and before the walk."""
        self.states: StateStep | None = None
        """What the trees would do to recurrent states, until the walk."""
        # [groups, T] int64, linear
        self.slots: torch.Tensor | None = None
        self.logits_counts: np.ndarray | None = None
        """Rows with logits by request, from the step's inputs to its adapters; else None."""
        self.adapters: tuple[tuple[int, ...], set[Any]] = ((), set())
        """LoRA ids by request, and vLLM's requests for them; empty on an engine without any."""
        # Marks of the clock: after the walk and after compaction.
        self.walked: Any = None
        self.compacted: Any = None

    def committed(self, input_batch: Any) -> CommitMap:
        """The rows whose tokens are final, once the trees are walked."""
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
        """The step as it is learnt from, perhaps later; `running` is `DraftPlanner.running`."""
        ids, requests = self.adapters
        names = {request.lora_int_id: request.lora_name for request in requests}
        adapters = tuple(names.get(lora_id, "") for lora_id in ids)
        return StepRecord(self.walked, self.compacted, running, adapters)
