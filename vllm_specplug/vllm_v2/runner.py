# SPDX-License-Identifier: Apache-2.0
"""The mixin that turns vLLM's Model Runner V2 into one that verifies trees.

vLLM's scheduler stays stock: the N nodes of a tree are N draft tokens to it. Nothing between the
start of a step and its emitted tokens is read on the host, so steps may be scheduled ahead. The
overrides below follow the order of a step. Seams: runner_v2_*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger

from vllm_specplug.drafting.drafter import device_tensor
from vllm_specplug.drafting.reserved_rows import RESERVED_ROWS_ATTRIBUTE
from vllm_specplug.metrics import STATS_ATTRIBUTE
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.grammar import PARENTS_ATTRIBUTE, STAYS_ATTRIBUTE
from vllm_specplug.vllm_attention.layer_support import check_cache_dtypes
from vllm_specplug.vllm_attention.state_rows import StateStep, attach_state_step
from vllm_specplug.vllm_attention.tree_rows import put_rows
from vllm_specplug.vllm_v2.backend import CpuTreeBackend, TreeBackend
from vllm_specplug.vllm_v2.device_trees import (
    Committed,
    StepTrees,
    Walk,
    attach_trees,
    committed_rows,
    set_axes,
    set_positions,
)
from vllm_specplug.vllm_v2.host_step import StepRecord
from vllm_specplug.vllm_v2.sampler import TreeSampler
from vllm_specplug.vllm_v2.speculator import TreeSpeculator
from vllm_specplug.vllm_v2.state_blocks import keep_states_as_committed, move_states_by_block
from vllm_specplug.vllm_v2.state_trees import accepted_lengths, last_state_rows, state_step
from vllm_specplug.vllm_v2.step_input import step_rows, verified_step
from vllm_specplug.vllm_v2.stop_tokens import MOST_STOP_TOKENS, StopTokens, stop_tokens_of
from vllm_specplug.vllm_v2.tree_params import TreeParams
from vllm_specplug.vllm_worker.cache_groups import draft_group
from vllm_specplug.vllm_worker.calibration import start_budget
from vllm_specplug.vllm_worker.constrained import ConstrainedRequests
from vllm_specplug.vllm_worker.draft_planner import DraftPlanner, step_metrics
from vllm_specplug.vllm_worker.drafter_memory import bind_drafter_memory
from vllm_specplug.vllm_worker.layer_states import collect_layer_states
from vllm_specplug.vllm_worker.proposer import DrafterHost
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.state_layers import check_state_blocks

logger = init_logger("vllm.specplug.runner")

if TYPE_CHECKING:
    # `vllm.v1.worker.gpu.model_runner.GPUModelRunner` or a subclass.
    _Runner: Any
else:
    _Runner = object


def make_speculator(stock: Any) -> Any:
    """`init_speculator` of a runner that verifies trees where memory is the host's. Seam:
    speculator."""
    return TreeSpeculator


def _plain_reason(request: Any, stop_tokens: set[int]) -> str | None:
    """Why a request decodes without drafts; None where it may have them."""
    params = request.sampling_params
    if params is None or len(stop_tokens) > MOST_STOP_TOKENS:
        return "no_draft"
    if params.repetition_detection is not None:
        # It ends a request at any token, and what a walk has behind it counts as computed.
        return "no_draft"
    return None if request.prompt_embeds is None else "embeds"


def _stop_tokens(request: Any) -> set[int]:
    params = request.sampling_params
    return set() if params is None else stop_tokens_of(params)


class TreeRunnerMixin(_Runner):
    """Put before V2's `GPUModelRunner` or a subclass of it."""

    speculator: TreeSpeculator

    def __init__(self, vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, device, *args, **kwargs)
        spec = vllm_config.speculative_config
        self.tree_spec = spec
        self.tree_backend = self.make_tree_backend()
        self.tree_metrics = step_metrics(spec)
        self.planner = DraftPlanner.for_engine(
            vllm_config, self.tree_metrics.stats, self.tree_backend.step_clock()
        )
        self.speculator.begin(
            self.planner,
            self.tree_metrics.stats,
            self._committed_rows,
            lambda: self.tree_walk,
            self._running_step,
            lambda *args: self._record_verification(*args),
        )
        self.stop_tokens = StopTokens(self.max_num_reqs, device)
        # Marks of the clock: after the walk and after compaction.
        self.tree_marks: tuple[Any, Any] = (None, None)
        # Of the running step; None where it has no drafts, and for dummies.
        self.tree_step: StepTrees | None = None
        self.tree_walk: Walk | None = None
        # What the step's trees would do to recurrent states, until the walk.
        self.tree_states: StateStep | None = None
        # The same for a forward of dummies.
        self.rehearsed_states: StateStep | None = None
        # Running requests with a grammar.
        self.tree_constrained = ConstrainedRequests()
        # KV cache group of the drafter's own layers.
        self.draft_group = 0
        # [groups, T] int64 slots of the running step, linear.
        self.tree_slots: torch.Tensor | None = None
        # Rows with logits by request, from a step's inputs to its adapters; else None.
        self.logits_counts: np.ndarray | None = None
        # Whether those of a calibration are loaded.
        self.has_dummy_adapters = False
        # LoRA ids of the running step by request, and vLLM's requests for them.
        self.step_adapters: tuple[tuple[int, ...], set[Any]] = ((), set())

    # -- set-up ---------------------------------------------------------------------------

    def make_tree_backend(self) -> TreeBackend:
        """How this device verifies trees."""
        return CpuTreeBackend()

    def maybe_setup_dummy_loras(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_dummy_adapters:
            return nullcontext()
        return super().maybe_setup_dummy_loras(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        spec = self.tree_spec
        if spec.aux_layers:
            # Not before: vLLM would set the layers of one of its own heads.
            self.use_aux_hidden_state_outputs = True
            if not collect_layer_states(
                self.model, spec.aux_layers, self.vllm_config, str(spec.plugin_method)
            ):
                self.model.set_aux_hidden_state_layers(spec.aux_layers)
        self.drafter.load_model(self.model)
        self.tree_params = TreeParams(
            self.sampler, lambda: self.tree_step, self.num_speculative_steps
        )
        self.rejection_sampler = TreeSampler(
            self.sampler, self._running_trees, self._set_walk, self.stop_tokens
        )
        stock = self.model_state.prepare_attn

        def prepare_attn(
            input_batch: Any, cudagraph_mode: Any, block_tables: Any, *args: Any, **kwargs: Any
        ) -> Any:
            rows = None
            is_dummy = kwargs.get("for_capture", False)
            is_graph = is_dummy or cudagraph_mode == CUDAGraphMode.FULL
            if is_graph and self.tree_backend.captures_trees():
                # Before vLLM's own, which changes the lengths of what it captures.
                trees = None if is_dummy else self.tree_step
                rows = self.tree_backend.graph_rows(trees, input_batch, block_tables)
            metadata = stock(input_batch, cudagraph_mode, block_tables, *args, **kwargs)
            if rows is None:
                self.tree_backend.attach(metadata, input_batch, self.tree_step, block_tables)
            else:
                put_rows(metadata, rows)
            if self.tree_step is not None and self.drafter.state_layers.names:
                self.tree_states = state_step(
                    input_batch, self.tree_step, self.tree_backend.state_step
                )
            states = self.tree_states or self.rehearsed_states
            if states is not None:
                attach_state_step(metadata, self.drafter.state_layers.names, states)
            return metadata

        self.model_state.prepare_attn = prepare_attn
        self._moves_states = bool(
            self.drafter.state_layers.names and self.cache_config.mamba_cache_mode == "align"
        )
        if self._moves_states:
            if self.tree_backend.is_host:
                move_states_by_block(self.model_state, self.state.layers)
            else:
                keep_states_as_committed(self.model_state)
        if self.model_config.uses_mrope:
            self._follow_depth_on_all_axes()

    def _follow_depth_on_all_axes(self) -> None:
        """Those of the model state come after `prepare_attn`."""
        stock = self.model_state.prepare_inputs

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            inputs = stock(*args, **kwargs)
            if self.tree_step is not None:
                set_axes(self.tree_step, inputs["positions"])
            return inputs

        self.model_state.prepare_inputs = prepare_inputs

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if kwargs.get("is_profiling") or (args and args[0]):
            # A small cache to measure graphs with, dropped right after: it must not be kept alive.
            return
        state, method = self.state, str(self.tree_spec.plugin_method)
        served = state.layers if self.tree_backend.reads_fp8 else None
        check_cache_dtypes(state.target_caches(), state.dtype, method, served)
        check_state_blocks(state.kv_cache_config, self.tree_spec.num_speculative_tokens, method)
        self.tree_backend.bind(state.target_groups())
        self.draft_group = draft_group(state.kv_cache_config, state.layers, method)
        layers = self.drafter.cache_layers
        if layers:
            scale = layers[0].spec.head_dim ** -0.5
            table = partial(state.block_table, self.draft_group)
            state.drafter.bind_cache(self.tree_backend.draft_cache(layers, table, scale))
        bind_drafter_memory(state, method)

    def start_budget(self) -> None:
        """Measures step costs for an adaptive budget. Call once the model is ready to serve."""
        start_budget(self.planner, self.state)

    @cached_property
    def state(self) -> RunnerView:
        """vLLM's side of this runner, beside its steps."""
        return RunnerView(self)

    @property
    def drafter(self) -> DrafterHost:
        """The method's drafter and its layers."""
        return self.speculator.proposer

    # -- before the forward -----------------------------------------------------------------

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        # A dummy step has no trees, and may come between any two others.
        if not kwargs.get("dummy_run"):
            self.planner.begin_step()
        self.tree_step = self.tree_walk = self.tree_states = self.logits_counts = None
        self.step_adapters = (), set()
        return super().execute_model(*args, **kwargs)

    def finish_requests(self, scheduler_output: Any) -> None:
        # Every step passes here, also the empty one that reports what finished before the engine
        # goes idle. A name may come back at once, with another request behind it.
        ended = {*scheduler_output.finished_req_ids}
        ended.update(request.req_id for request in scheduler_output.scheduled_new_reqs)
        gone = ended.union(scheduler_output.preempted_req_ids or ())
        if gone:
            # Ranks must free their slots in one order: sets of strings have none.
            self.speculator.forget(sorted(gone), sorted(ended))
        self.tree_constrained.update(scheduler_output)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: Any) -> None:
        new = scheduler_output.scheduled_new_reqs
        with self._sessions_keep_their_states([request.req_id for request in new]):
            super().add_requests(scheduler_output)
        stops = [_stop_tokens(request) for request in new]
        for request, ends in zip(new, stops, strict=True):
            params = request.sampling_params
            extra_args = None if params is None else params.extra_args
            self.speculator.add(
                request.req_id,
                extra_args,
                _plain_reason(request, ends),
                request.prefill_token_ids,
            )
        if new:
            indices = [self.req_states.req_id_to_index[request.req_id] for request in new]
            slots = device_tensor(indices, self.device)
            self.speculator.store.clear(slots)
            self.stop_tokens.put(slots, stops)

    @contextmanager
    def _sessions_keep_their_states(self, req_ids: list[str]) -> Iterator[None]:
        """While vLLM adds requests, among them those whose input goes on after an answer: their
        states stay in the block of the last step's last row, which a path need not have reached."""
        if not self._moves_states:
            yield
            return
        blocks = self.model_state._mamba_state_idx_gpu
        index = self.req_states.req_id_to_index
        kept = {req_id: blocks[index[req_id]].clone() for req_id in req_ids if req_id in index}
        yield
        for req_id, block in kept.items():
            blocks[index[req_id]] = block

    def prepare_attn(self, input_batch: Any) -> Any:
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        # Slots stay linear; only rotary positions follow depth.
        self.tree_slots = slot_mappings
        self.logits_counts = np.diff(input_batch.cu_num_logits_np)
        if input_batch.num_draft_tokens:
            rows = step_rows(input_batch, self.num_speculative_steps)
            self.tree_step = trees = attach_trees(self.speculator.store, rows)
            set_positions(trees, input_batch.positions)
        return block_tables, slot_mappings

    def _set_active_loras(
        self, prompt_mapping: tuple[int, ...], token_mapping: Any, requests: set[Any], *args: Any
    ) -> None:
        # vLLM maps one logits row per request; a tree has one per node as well.
        counts, self.logits_counts = self.logits_counts, None
        if counts is not None:
            self.step_adapters = prompt_mapping, requests
            prompt_mapping = tuple(np.repeat(prompt_mapping, counts).tolist())
        super()._set_active_loras(prompt_mapping, token_mapping, requests, *args)

    # -- after the forward -------------------------------------------------------------------

    def _running_trees(self) -> StepTrees:
        assert self.tree_step is not None
        return self.tree_step

    def _set_walk(self, walk: Walk) -> None:
        self.tree_walk = walk

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        output = super().sample(hidden_states, input_batch, grammar_output)
        # States and caches before anything can read or hash their blocks. What applies to states
        # is part of verification, as in a calibration: it costs by tree and not by what moves.
        if self.tree_walk is not None and self.tree_states is not None:
            walk = self.tree_walk
            lengths = accepted_lengths(input_batch, self._running_trees(), walk)
            self.tree_states.commit(last_state_rows(input_batch, walk), *lengths)
        walked = self.planner.clock.mark()
        if self.tree_walk is not None and self.tree_slots is not None:
            self.tree_backend.compact(self._running_trees(), self.tree_walk, self.tree_slots)
        self.tree_marks = walked, self.planner.clock.mark()
        if self.tree_backend.is_host:
            trees, lengths = self.speculator.trees, input_batch.seq_lens
            self._record_verification(input_batch, self.tree_walk, lengths, trees)
        return output

    def _committed_rows(self, input_batch: Any) -> Committed:
        assert self.tree_slots is not None
        num_tokens = input_batch.num_tokens
        slots = self.tree_slots[self.draft_group, :num_tokens]
        positions = input_batch.positions[:num_tokens]
        if self.tree_walk is not None:
            return committed_rows(self._running_trees(), self.tree_walk, slots, positions)
        rows = torch.arange(num_tokens, device=slots.device)
        return Committed(rows, slots, positions, input_batch.logits_indices)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        payload = self.tree_metrics.end_step()
        if output is not None:
            # What goes to the scheduler once the tokens are on the host.
            if payload is not None:
                setattr(output.model_runner_output, STATS_ATTRIBUTE, payload)
            if self.speculator.reserved is not None:
                attribute = RESERVED_ROWS_ATTRIBUTE
                setattr(output.model_runner_output, attribute, self.speculator.reserved)
        return output

    def take_draft_token_ids(self) -> Any:
        """Drafts for a scheduler that waits for them: as many per request as its tree has nodes,
        with their parents where a grammar is to follow them."""
        drafts = super().take_draft_token_ids()
        if drafts is not None:
            parents = {}
            for req_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
                tree = self.speculator.tree_of(req_id)
                count = 0 if tree is None else tree.num_nodes
                del token_ids[count:]
                if tree is not None and count and req_id in self.tree_constrained:
                    parents[req_id] = tree.parent_indices.tolist()
            if parents:
                setattr(drafts, PARENTS_ATTRIBUTE, parents)
                setattr(drafts, STAYS_ATTRIBUTE, True)
        return drafts

    def _running_step(self) -> StepRecord:
        """The running step, for a record of it once the host has read it."""
        adapters = tuple(self.state.adapter_names(len(self.step_adapters[0])))
        return StepRecord(*self.tree_marks, self.planner.running, adapters)

    def _record_verification(
        self,
        input_batch: Any,
        walk: Walk | None,
        seq_lens: torch.Tensor | np.ndarray,
        trees: Mapping[str, DraftTree],
        record: StepRecord | None = None,
    ) -> None:
        """Counts a step's trees and learns from them and from its time.

        Args:
            walk: in the host's memory, as `seq_lens`; None in a step without drafts.
            trees: those it verified, before they were cut to what was scheduled.
            record: of a step that may be over; None for the running one.
        """
        record = record or self._running_step()
        walked, compacted = record.walked, record.compacted
        step = verified_step(input_batch, trees, walk, seq_lens)
        stats = self.tree_metrics.stats
        step_nodes = 0
        # The step's own: those of the runner may be a later one's.
        adapters = record.adapters or (None,) * len(step.requests)
        for r, adapter in zip(step.requests, adapters, strict=True):
            if r.tree is not None and r.tree.num_nodes:
                stats.observe_draft(r.tree.num_nodes, len(r.accepted_path), adapter)
                step_nodes += r.tree.num_nodes
        self.planner.observe(step, input_batch.req_ids, walked, record.running)
        if step_nodes:
            stats.observe_step_nodes(step_nodes)
            self.planner.clock.measure(walked, compacted, partial(stats.observe_ms, "compact"))
