# SPDX-License-Identifier: Apache-2.0
"""Drafting on V2 where memory is the device's.

Where the budget is fixed and the drafter can (`Drafter.drafts_on_device`), trees are built on the
device from what lies there, and nothing is read: what the host wants to know of a step comes in a
copy that is looked at a step later.

Everything else hands over `DraftTree`s, which are arrays of the host. What that needs of a step
comes in one copy, which is waited for once the drafter's context has been launched; the trees go
back in copies that nothing waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_world_size

from vllm_specplug.drafting.drafter import CommittedTokens, DeviceRequests, DeviceTrees
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_attention.gpu import wants_full_graphs
from vllm_specplug.vllm_v2.device_trees import Committed
from vllm_specplug.vllm_v2.draft_graphs import DraftGraphs
from vllm_specplug.vllm_v2.host_step import (
    HostStep,
    KnownTokens,
    StepCopy,
    StepRecord,
    TreesCopy,
    packed_trees,
    to_device,
)
from vllm_specplug.vllm_v2.speculator import TreeSpeculator
from vllm_specplug.vllm_v2.step_input import HostRequest
from vllm_specplug.vllm_worker.ranks import first_rank_tensor


class DeviceSpeculator(TreeSpeculator):
    """Drafts one tree per request of a batch whose state the host has to copy."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.vllm_config = vllm_config
        self.known: dict[str, KnownTokens] = {}
        # Trees built on the device and their rows, by running request.
        self.copies: dict[str, tuple[TreesCopy, int]] = {}
        # Steps that the host has not looked at yet, in their order.
        self._late: deque[_LateStep] = deque()
        self.draft_graphs: DraftGraphs | None = None

    def add(
        self,
        req_id: str,
        extra_args: dict[str, Any] | None,
        plain: str | None,
        token_ids: Sequence[int],
    ) -> None:
        super().add(req_id, extra_args, plain, token_ids)
        self.known[req_id] = KnownTokens(token_ids)

    def forget(self, gone: Sequence[str], ended: Sequence[str]) -> None:
        # An engine that goes idle has no later step to count the last ones in.
        self._look_back()
        super().forget(gone, ended)
        for req_id in gone:
            self.known.pop(req_id, None)
            self.copies.pop(req_id, None)

    def tree_of(self, req_id: str) -> DraftTree | None:
        # Asked for by a scheduler that waits, or for a grammar.
        if req_id in self.copies:
            copy, row = self.copies[req_id]
            return copy.read(row)
        return super().tree_of(req_id)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        # vLLM drops the graphs it measured memory with, and comes here again.
        self.draft_graphs = None
        drafter = self.proposer.drafter
        if not wants_full_graphs() or cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
            return
        if drafter.drafts_on_device and not self.planner.is_adaptive:
            self.draft_graphs = DraftGraphs(
                self.vllm_config,
                self.device,
                drafter.propose_on_device,
                self.proposer.options.tree_width,
                self.store.num_nodes,
            )

    def capture(self) -> None:
        if self.draft_graphs is not None:
            self.draft_graphs.capture_drafts()

    @property
    def _reads_nothing(self) -> bool:
        # Not kept: vLLM's warm-up steps come before the budget is calibrated.
        return self.planner.adaptive is None and self.proposer.drafter.drafts_on_device

    def _propose(
        self,
        input_batch: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        most: int,
    ) -> torch.Tensor:
        final = self.committed_rows(input_batch)
        width = self.store.num_nodes + 1
        copy = StepCopy(self.req_states, input_batch, self.walk(), num_sampled, width)
        committed = _all_rows(final, aux_hidden_states)
        if self.spec.reads_next_tokens:
            following = self._next_tokens(input_batch, final)
            committed = replace(committed, next_token_ids=following)
        self.proposer.drafter.observe(replace(committed, output_states=last_hidden_states))
        if self._reads_nothing:
            self._look_back()
            trees = {r: self.copies[r] for r in input_batch.req_ids if r in self.copies}
            self._late.append(_LateStep(input_batch, copy, trees, self.running()))
            return self._draft_on_device(input_batch, num_sampled, most)
        read = copy.read()
        self.record(input_batch, read.walk, read.seq_lens, self.trees)
        return self._draft(input_batch, self._batch(input_batch, read), most)

    def _look_back(self) -> None:
        """Counts the steps whose copies have come."""
        while self._late and self._late[0].has_come:
            late = self._late.popleft()
            read = late.copy.read()
            trees = {req_id: copy.read(row) for req_id, (copy, row) in late.trees.items()}
            self.record(late.input_batch, read.walk, read.seq_lens, trees, late.record)

    def _draft_on_device(
        self, input_batch: Any, num_sampled: torch.Tensor, most: int
    ) -> torch.Tensor:
        """Trees within fixed budgets, from what lies on the device: kept, and their token ids int64
        [R, N]."""
        start = self.planner.clock.mark()
        states, slots = self.req_states, input_batch.idx_mapping.long()
        budgets = self._budgets(input_batch, most)
        longest = np.minimum(states.max_seq_len[input_batch.idx_mapping_np], self.max_model_len)
        limits = to_device(np.stack([budgets, longest.astype(np.int32)]), self.device)
        totals = states.total_len.gpu[slots]
        is_decoding = num_sampled > 0
        # The step after this one always emits a token of its own.
        depths = torch.minimum(limits[1] - totals - 1, limits[0])
        requests = DeviceRequests(
            anchors=states.last_sampled_tokens[slots, 0],
            context_lens=totals - 1,
            budgets=torch.where(is_decoding & (depths > 0), limits[0], 0),
            depths=depths,
            width=self.proposer.options.tree_width,
            num_nodes=self.store.num_nodes,
            max_context=int(input_batch.seq_lens_cpu_upper_bound.max()),
        )
        if budgets.any():
            draft = self.draft_graphs or self.proposer.drafter.propose_on_device
            trees = _first_rank(draft(requests))
        else:
            trees = _no_trees(len(requests), self.store.num_nodes, self.device)
        copy = TreesCopy(trees)
        for row, req_id in enumerate(input_batch.req_ids):
            self.copies[req_id] = copy, row
        self.planner.drafted_on_device(start, budgets.tolist())
        roots = torch.where(is_decoding, totals - 1, -1)
        return self.store.put(
            slots, roots, trees.token_ids, trees.parents, trees.counts, trees.scores
        )

    def _budgets(self, input_batch: Any, most: int) -> np.ndarray:
        """Most nodes of each request's next tree, int32 [R], as far as the host knows."""
        slots = input_batch.idx_mapping_np
        ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        # Upper bounds of requests that decode; of prompts they are exact.
        is_decoding = ends >= self.req_states.prefill_len.np[slots]
        running = int(is_decoding.sum())
        budgets = np.zeros(len(slots), np.int32)
        for i, req_id in enumerate(input_batch.req_ids):
            if not is_decoding[i]:
                continue
            if req_id in self.plain:
                self.stats.observe_plain(self.plain[req_id])
                continue
            nodes, reason = self.planner.nodes_for(
                req_id, self.extra_args.get(req_id), int(ends[i]), running
            )
            if nodes > most:
                nodes, reason = most, "batch"
            if nodes < 1:
                self.stats.observe_plain(reason)
            budgets[i] = max(nodes, 0)
        return budgets

    def _next_tokens(self, input_batch: Any, final: Committed) -> torch.Tensor:
        """The token after each row's, int64 [T]; 0 where none is known."""
        counts = torch.diff(input_batch.query_start_loc[: input_batch.num_reqs + 1])
        slots = torch.repeat_interleave(
            input_batch.idx_mapping.long(), counts, output_size=len(final.positions)
        )
        after = final.positions.long() + 1
        is_known = after < self.req_states.total_len.gpu[slots]
        found = self.req_states.all_token_ids.gpu[slots, after.clamp_max(self.max_model_len - 1)]
        return torch.where(is_known, found, 0).long()

    def _batch(self, input_batch: Any, read: HostStep) -> list[HostRequest]:
        totals, computed = read.totals.tolist(), read.computed.tolist()
        sampled, latest = read.sampled.tolist(), read.latest.numpy()
        batch = []
        for i, req_id in enumerate(input_batch.req_ids):
            known, slot = self.known[req_id], int(input_batch.idx_mapping_np[i])
            if sampled[i]:
                known.add(latest[i, -sampled[i] :])
            if known.count != totals[i]:
                # A request that was given more tokens meanwhile.
                tokens = self.req_states.all_token_ids.gpu[slot, : totals[i]].cpu()
                known = self.known[req_id] = KnownTokens(tokens.numpy())
            batch.append(
                HostRequest(
                    req_id=req_id,
                    index=i,
                    token_ids=known.tokens,
                    max_len=int(self.req_states.max_seq_len[slot]),
                    is_decoding=sampled[i] > 0,
                    num_computed=computed[i],
                )
            )
        return batch


@dataclass(frozen=True)
class _LateStep:
    """A step that the host looks at once its copy has come."""

    input_batch: Any
    copy: StepCopy
    # those it verified, by request
    trees: dict[str, tuple[TreesCopy, int]]
    record: StepRecord

    @property
    def has_come(self) -> bool:
        # Its trees were drafted, and copied, before it.
        return self.copy.copy.has_come


def _no_trees(count: int, num_nodes: int, device: torch.device) -> DeviceTrees:
    token_ids = torch.zeros((count, num_nodes), dtype=torch.int64, device=device)
    numbers = torch.zeros((count, num_nodes), dtype=torch.int32, device=device)
    return DeviceTrees(
        token_ids, numbers, numbers, torch.zeros_like(numbers, dtype=torch.float32), numbers[:, 0]
    )


def _first_rank(trees: DeviceTrees) -> DeviceTrees:
    """The first tensor parallel rank's, on every rank."""
    if get_tensor_model_parallel_world_size() == 1:
        return trees
    first = first_rank_tensor(packed_trees(trees))
    token_ids, parents, depths, scores = first[:, 1:].chunk(4, dim=1)
    return DeviceTrees(
        token_ids.long(), parents, depths, scores.contiguous().view(torch.float32), first[:, 0]
    )


def _all_rows(final: Committed, aux_hidden_states: list[torch.Tensor] | None) -> CommittedTokens:
    """What a drafter observes: every row of the forward. Those that committed nothing have no slot,
    and kernels that write caches pass over them; which they are is only known on the device."""
    return CommittedTokens(
        aux_hidden_states=aux_hidden_states or [],
        rows=final.computed_rows,
        positions=final.positions,
        slots=final.slots,
        last_rows=final.last_rows,
    )


def make_device_speculator(stock: Any) -> Any:
    """`init_speculator` of a runner that verifies trees on a device. Seam: device_speculator."""
    return DeviceSpeculator
