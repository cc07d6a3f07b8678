# SPDX-License-Identifier: Apache-2.0
"""One asynchronous copy per step, from which the host learns what a device did."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.device_levels import packed_trees, unpacked_trees
from vllm_specplug.drafting.device_requests import DeviceTrees
from vllm_specplug.tree import DraftTree, step_trees
from vllm_specplug.tree.step_trees import Walk


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = tensor
        self._array: np.ndarray | None = None
        if tensor.device.type == "cuda":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def has_arrived(self) -> bool:
        """Whether `read` returns without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> np.ndarray:
        """Waits for the copy and returns it, as an array: its rows are read in a tenth of the time
        that a tensor's take."""
        if self._event is not None:
            self._event.synchronize()
        if self._array is None:
            self._array = self._copy.numpy()
        return self._array


@dataclass(frozen=True)
class HostStep:
    """A step after its walk, in host memory. W: most tokens that a request emits in a step."""

    # [R] tokens of each request at the end of the step's forward
    seq_lens: np.ndarray
    # [R] tokens of each request now
    totals: np.ndarray
    # [R] tokens of each request in the cache
    computed: np.ndarray
    # [R] tokens that the step sampled; 0 while a prompt is incomplete
    sampled: np.ndarray
    # [R, W] last tokens of each request, the newest at the end
    latest: np.ndarray
    walk: Walk | None


def step_table(
    req_states: Any, input_batch: Any, walk: Walk | None, num_sampled: torch.Tensor, width: int
) -> torch.Tensor:
    """Packs a step into int32 [R, columns].

    The columns are `seq_lens`, `totals`, `computed` and `sampled` of `HostStep`, the lengths of a
    walk if there is one, `latest`, and the path rows of that walk.
    """
    slots = input_batch.idx_mapping
    lengths, computed = req_states.total_len.gpu, req_states.num_computed_tokens.gpu
    token_ids = req_states.all_token_ids.gpu
    if step_trees.has_kernels(slots.device):
        from vllm_specplug.kernels.step_tables_triton import step_table_triton

        paths = None if walk is None else (walk.lengths, walk.path_rows)
        return step_table_triton(
            slots, input_batch.seq_lens, lengths, computed, num_sampled, token_ids, paths, width
        )
    slots = slots.long()
    totals = lengths[slots]
    positions = totals[:, None] - torch.arange(width, 0, -1, device=slots.device)
    columns = [
        input_batch.seq_lens[: len(slots)],
        totals,
        computed[slots],
        num_sampled,
        *([walk.lengths] if walk is not None else ()),
    ]
    parts = [torch.stack([column.to(torch.int32) for column in columns], dim=1)]
    parts.append(token_ids[slots[:, None], positions.clamp_min(0)].to(torch.int32))
    if walk is not None:
        parts.append(walk.path_rows.to(torch.int32))
    return torch.cat(parts, dim=1)


class StepCopy:
    """The `HostStep` of a step, on its way to the host. Make it once vLLM has updated its request
    states.

    Args:
        walk: None in a step without drafts.
        width: W, the most tokens that a request emits in a step.
    """

    def __init__(
        self,
        req_states: Any,
        input_batch: Any,
        walk: Walk | None,
        num_sampled: torch.Tensor,
        width: int,
    ) -> None:
        self.width = width
        self.has_walk = walk is not None
        self.copy = HostCopy(step_table(req_states, input_batch, walk, num_sampled, width))

    def read(self) -> HostStep:
        """Waits for the copy and returns the step."""
        table = self.copy.read()
        first = 4 + self.has_walk
        latest = table[:, first : first + self.width]
        walk = None
        if self.has_walk:
            paths = table[:, first + self.width :]
            # `latest` holds the emitted tokens.
            emitted = torch.empty((len(table), 0), dtype=torch.int64)
            walk = Walk(emitted, torch.from_numpy(paths), torch.from_numpy(table[:, 4]))
        return HostStep(
            seq_lens=table[:, 0],
            totals=table[:, 1],
            computed=table[:, 2],
            sampled=table[:, 3],
            latest=latest,
            walk=walk,
        )


def trees_table(
    trees: DeviceTrees,
    room: torch.Tensor,
    lookup_only: DeviceTrees | None = None,
    found: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Packs trees into int32 [R, columns]; see `TreesCopy` for the arguments.

    The columns are `room`, `trees`, `lookup_only`, and the suffix lengths and tokens of `found`.
    """
    if step_trees.has_kernels(room.device):
        from vllm_specplug.kernels.step_tables_triton import trees_table_triton

        others = None if lookup_only is None else lookup_only.fields
        return trees_table_triton(trees.fields, room, others, found)
    parts = [room[:, None], packed_trees(trees)]
    if lookup_only is not None:
        parts.append(packed_trees(lookup_only))
    if found is not None:
        sizes, tokens = found
        parts += [sizes, tokens.flatten(1)]
    return torch.cat(parts, dim=1)


class TreesCopy:
    """Trees of R requests on their way to the host.

    Args:
        trees: the trees as drafted.
        room: int32 [R], for how many nodes of each tree the next step has rows.
        lookup_only: trees of n-gram branches only; None if the host does not need them.
        found: the branches themselves, see `device_ngrams.Found`.
    """

    def __init__(
        self,
        trees: DeviceTrees,
        room: torch.Tensor,
        lookup_only: DeviceTrees | None = None,
        found: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        # First and last columns: of the trees, of `lookup_only`, of the branches and their tokens.
        self._trees = 1, 2 + 4 * trees.token_ids.shape[1]
        self._branches = self._trees[1], self._trees[1]
        if lookup_only is not None:
            self._branches = self._trees[1], self._trees[1] + 1 + 4 * lookup_only.token_ids.shape[1]
        self._count, self._length = (0, 0) if found is None else found[1].shape[1:]
        self.copy = HostCopy(trees_table(trees, room, lookup_only, found))

    def read(self, row: int) -> DraftTree:
        """Waits for the copy and returns the tree of one request, cut to its rows."""
        return self.merged[row].prefix(self.room[row])

    def num_nodes(self, row: int) -> int:
        """Waits for the copy and returns the number of nodes of one tree that have a row."""
        return min(self.room[row], int(self.copy.read()[row, 1]))

    @cached_property
    def merged(self) -> list[DraftTree]:
        """Waits for the copy and returns the R trees as drafted."""
        return self._split(*self._trees)

    @cached_property
    def lookup_only(self) -> list[DraftTree]:
        """Returns the R trees of branches only; an empty list if the copy has none."""
        return self._split(*self._branches)

    @cached_property
    def room(self) -> list[int]:
        """[R] for how many nodes of each tree the next step has rows. Set it to cut the trees."""
        room: list[int] = self.copy.read()[:, 0].tolist()
        return room

    def _split(self, first: int, end: int) -> list[DraftTree]:
        table = self.copy.read()[:, first:end]
        return unpacked_trees(table) if table.size else [DraftTree.empty()] * len(self.room)

    def branches(self, row: int) -> list[tuple[int, list[int]]]:
        """Returns the matched suffix length and the tokens of each branch of one request."""
        line = self.copy.read()[row, self._branches[1] :]
        sizes, tokens = line[: self._count], line[self._count :]
        branches = tokens.reshape(self._count, self._length)
        return [
            (int(size), [token for token in branch.tolist() if token >= 0])
            for size, branch in zip(sizes, branches, strict=True)
            if size
        ]


def warm_up(req_states: Any, num_nodes: int) -> None:
    """Compiles the kernels of the tables above, for trees of up to `num_nodes` nodes."""
    slots = torch.zeros(1, dtype=torch.int64, device=req_states.total_len.gpu.device)
    one = slots.int()
    batch = SimpleNamespace(idx_mapping=slots, seq_lens=one)
    step_table(req_states, batch, None, one, num_nodes + 1)
    trees_table(DeviceTrees.none(1, num_nodes, slots.device), one)
