# SPDX-License-Identifier: Apache-2.0
"""Carries accepted paths and new trees from the last pipeline stage to the earlier ones.

vLLM's `PPHandler` broadcasts the tokens and drafts of step T. With P stages, an earlier stage takes
them over just before step T + P, and so does this module. No step before that reads rows that are
not compacted:

- A request that decoded in step T has its next step in T + P.
- Other requests find these rows only in the prefix cache. The scheduler caches them with the output
  of step T, which it processes after it has scheduled step T + P - 1.
- A paused engine processes outputs earlier. Workers call `settle` before the pause is complete.

Seam: pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.pp_utils import compute_need_sampled_mask

from vllm_specplug.kernels import to_device
from vllm_specplug.tree.step_trees import StepTrees, TreeStore, Walk
from vllm_specplug.vllm_v2.backend import TreeBackend
from vllm_specplug.vllm_v2.step_context import StepContext


@dataclass(frozen=True)
class Arrival:
    """What an earlier stage receives for a step of R requests, and what it keeps of that step."""

    # int32 [R, columns], see `StageRelay._table`; valid once `event` has completed
    table: torch.Tensor
    event: Any
    # None in a step without drafts
    trees: StepTrees | None
    # [groups, T] int64; None in a step without drafts
    slot_mappings: torch.Tensor | None


class StageRelay:
    """Exchanges accepted paths and trees with the other stages, for one rank.

    Args:
        handler: vLLM's `PPHandler`, whose queue has an entry, or None, for each step in flight.
        store: the trees of running requests, of up to N nodes.
    """

    def __init__(self, handler: Any, store: TreeStore, backend: TreeBackend) -> None:
        self.handler = handler
        self.store = store
        self.backend = backend

    def exchange(self, input_batch: Any, step: StepContext) -> None:
        """Broadcasts a step's paths and next trees from the last stage to the earlier ones.

        Call it on all ranks at the end of every step with requests.
        """
        if compute_need_sampled_mask(input_batch) is None:
            # vLLM exchanges nothing either: no later step needs the tokens of this one.
            return
        handler = self.handler
        if handler.is_last_rank:
            table = self._table(input_batch, step.walk)
        else:
            shape = input_batch.num_reqs, 1 + self.store.num_nodes + self.store.num_columns
            table = torch.empty(shape, dtype=torch.int32, device=handler.device)
        # The allocator must not reuse the memory before the broadcast has ended.
        table.record_stream(handler.broadcast_stream)
        with torch.cuda.stream(handler.broadcast_stream):
            handler.broadcast_stream.wait_stream(handler.main_stream)
            torch.distributed.broadcast(table, src=handler.last_rank, group=handler.broadcast_group)
            event = handler.broadcast_stream.record_event()
        if not handler.is_last_rank:
            # The next step overwrites vLLM's buffer of slots.
            slots = None if step.trees is None or step.slots is None else step.slots.clone()
            handler.queue[-1].specplug_arrival = Arrival(table, event, step.trees, slots)

    def _table(self, input_batch: Any, walk: Walk | None) -> torch.Tensor:
        """Returns int32 [R, 1 + N + columns]: length and nodes of each path, then the next tree as
        in `TreeStore.rows`."""
        trees = self.store.rows(input_batch.idx_mapping)
        if walk is None:
            return torch.nn.functional.pad(trees, (1 + self.store.num_nodes, 0))
        assert walk.nodes is not None
        return torch.cat([walk.lengths[:, None], walk.nodes, trees], dim=1)

    def settle(self) -> None:
        """Takes over the results of all steps in flight."""
        for entry in self.handler.queue:
            self.take_over(entry)

    def take_over(self, entry: Any) -> None:
        """Compacts the accepted paths and stores the next trees of requests that still run.

        Args:
            entry: an entry of vLLM's queue; None for a step whose tokens no later step needs.
        """
        arrival: Arrival | None = getattr(entry, "specplug_arrival", None)
        if arrival is None:
            return
        # A second compaction would move rows that the first one has overwritten.
        entry.specplug_arrival = None
        handler = self.handler
        handler.main_stream.wait_event(arrival.event)
        is_running = handler.req_idx_gen_np[entry.idx_mapping_np] == entry.gen_at_receive_np
        kept = np.flatnonzero(is_running)
        if not len(kept):
            return
        lengths, nodes, trees = arrival.table.split(
            [1, self.store.num_nodes, self.store.num_columns], dim=1
        )
        rows = to_device(kept, arrival.table.device)
        if arrival.trees is not None:
            assert arrival.slot_mappings is not None
            starts = arrival.trees.rows.starts[:-1, None].long()
            # Node i is logits row i + 1 of its request. Entries past the path are -1, the root.
            path_rows = starts + 1 + torch.nn.functional.pad(nodes, (1, 0), value=-1)
            # Another request may own the blocks of a freed one.
            moved = torch.zeros_like(lengths[:, 0])
            moved[rows] = lengths[rows, 0]
            # Nothing here reads the emitted tokens.
            walk = Walk(path_rows, path_rows, moved, nodes.contiguous())
            self.backend.compact(arrival.trees, walk, arrival.slot_mappings)
        self.store.put_rows(entry.idx_mapping[rows], trees[rows])
