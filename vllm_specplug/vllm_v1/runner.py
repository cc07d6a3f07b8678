# SPDX-License-Identifier: Apache-2.0
"""The mixin that turns vLLM's V1 model runner into one that verifies trees.

vLLM's scheduler stays stock: the N nodes of a tree are N draft tokens to it. The overrides
below follow the order of a step. Seams: runner_*.
"""

from __future__ import annotations

import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger

from vllm_specplug.drafting.committed_tokens import CommittedSteps
from vllm_specplug.drafting.drafter import CommittedTokens, DraftRequests
from vllm_specplug.kernels import to_device
from vllm_specplug.metrics import STATS_ATTRIBUTE
from vllm_specplug.seams import LOGITS_PROCESSORS
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.grammar import KEPT_NODES_ATTRIBUTE, PARENTS_ATTRIBUTE
from vllm_specplug.vllm_attention.layer_support import check_cache_dtypes
from vllm_specplug.vllm_attention.state_rows import StateStep, attach_state_step
from vllm_specplug.vllm_v1.penalty_processor import draft_penalties
from vllm_specplug.vllm_v1.runner_state import RunnerState, ScheduledRows
from vllm_specplug.vllm_v1.state_trees import accepted_lengths, last_state_rows, state_step
from vllm_specplug.vllm_v1.target_sampler import PLACEHOLDER_TOKEN_ID, TargetSampler
from vllm_specplug.vllm_v1.tree_backend import CpuTreeBackend, TreeBackend
from vllm_specplug.vllm_worker.cache_groups import (
    draft_group,
)
from vllm_specplug.vllm_worker.calibration import start_budget
from vllm_specplug.vllm_worker.constrained import ConstrainedRequests
from vllm_specplug.vllm_worker.draft_planner import Batch, DraftPlanner, step_metrics
from vllm_specplug.vllm_worker.drafter_memory import bind_drafter_memory
from vllm_specplug.vllm_worker.layer_states import collect_layer_states
from vllm_specplug.vllm_worker.proposer import DrafterHost
from vllm_specplug.vllm_worker.ranks import first_rank_trees
from vllm_specplug.vllm_worker.state_layers import check_state_blocks
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep

logger = init_logger("vllm.specplug.runner")


if TYPE_CHECKING:
    # `GPUModelRunner` or a subclass, which set attributes in many places.
    _Runner: Any
else:
    _Runner = object


class TreeRunnerMixin(_Runner):
    """Put before `GPUModelRunner` or a subclass of it."""

    drafter: DrafterHost

    def __init__(self, vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        with LOGITS_PROCESSORS.applied():
            super().__init__(vllm_config, device, *args, **kwargs)
        spec = vllm_config.speculative_config
        self.tree_spec = spec
        self.tree_backend = self.make_tree_backend()
        if spec.aux_layers:
            self.use_aux_hidden_state_outputs = True
        # Trees that wait for verification, by request id. A request that the scheduler leaves out
        # of a step keeps its drafts, and so its tree.
        self.proposed_trees: dict[str, DraftTree] = {}
        self.tree_step = TreeStep([])
        # What the step's trees would do to recurrent states, until the walk.
        self.tree_states: StateStep | None = None
        # The same for a forward of dummies.
        self.rehearsed_states: StateStep | None = None
        # KV cache group of the drafter's own layers.
        self.draft_group = 0
        # Requests that the drafter knows to have begun.
        self.begun: set[str] = set()
        self.tree_constrained = ConstrainedRequests()
        self.tree_metrics = step_metrics(spec)
        self.planner = DraftPlanner.for_engine(vllm_config, self.tree_metrics.stats)

    @cached_property
    def state(self) -> RunnerState:
        """vLLM's side of this runner; whatever is not an override asks it."""
        return RunnerState(self)

    @cached_property
    def committed_steps(self) -> CommittedSteps:
        """What the drafter has not seen. The hidden states of a device are not kept for it: a graph
        writes where its last replay did."""
        return CommittedSteps(self.drafter.drafter, keeps=self.state.device.type == "cpu")

    # -- set-up ---------------------------------------------------------------------------

    def make_tree_backend(self) -> TreeBackend:
        """How this device verifies trees."""
        return CpuTreeBackend()

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        return self.tree_spec.aux_layers or super()._get_eagle3_aux_layers_from_config()

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        spec = self.tree_spec
        if not spec.aux_layers or not collect_layer_states(
            self.get_model(), spec.aux_layers, self.vllm_config, str(spec.plugin_method)
        ):
            super()._setup_eagle3_aux_hidden_state_outputs()

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if kwargs.get("is_profiling"):
            # A small cache to measure graphs with, dropped right after: it must not be kept alive.
            return
        state, drafter, method = self.state, self.drafter.drafter, str(self.tree_spec.plugin_method)
        caches, groups = state.target_caches(), state.target_groups()
        served = state.layers if self.tree_backend.reads_fp8 else None
        check_cache_dtypes(caches, state.dtype, method, served)
        check_state_blocks(state.kv_cache_config, self.tree_spec.num_speculative_tokens, method)
        self.tree_backend.bind(groups)
        self.draft_group = draft_group(state.kv_cache_config, state.layers, method)
        layers = self.drafter.cache_layers
        if layers:
            drafter.bind_cache(
                self.tree_backend.draft_cache(
                    layers,
                    partial(state.block_table, self.draft_group),
                    scale=layers[0].spec.head_dim ** -0.5,
                )
            )
        bind_drafter_memory(state, method)

    def start_budget(self) -> None:
        """Measures step costs for an adaptive budget. Call once the model is ready to serve."""
        start_budget(self.planner, self.state)

    # -- the step ------------------------------------------------------------------------

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.planner.begin_step()
        return super().execute_model(*args, **kwargs)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        # A replica without requests runs dummies beside the others; the trees of its last step do
        # not belong to them.
        self.tree_step = TreeStep([])
        return super()._dummy_run(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        payload = self.tree_metrics.end_step()
        if payload is not None and output is not None:
            setattr(output, STATS_ATTRIBUTE, payload)
        return output

    # -- before the forward ---------------------------------------------------------------

    def _update_states(self, scheduler_output: Any) -> Any:
        # Every step passes here, also the empty one that reports what finished before the engine
        # goes idle. A name may come back at once, with another request behind it.
        ended = {*scheduler_output.finished_req_ids}
        ended.update(request.req_id for request in scheduler_output.scheduled_new_reqs)
        preempted = scheduler_output.preempted_req_ids or set()
        gone = ended.union(preempted)
        if gone:
            self.committed_steps.flush()
            # Ranks must free their slots in one order: sets of strings have none.
            self.drafter.drafter.forget(sorted(gone))
            self.planner.forget(sorted(ended))
            self.begun -= gone
            for req_id in gone:
                self.proposed_trees.pop(req_id, None)
        for req_id in preempted.union(scheduler_output.finished_req_ids):
            # vLLM drops these in steps with rows alone, and a name may come back before one. That
            # of a session whose input goes on stays where its last step left its state.
            self.mamba_state_idx.pop(req_id, None)
        self.tree_constrained.update(scheduler_output)
        after_forward = super()._update_states(scheduler_output)
        self.state.drop_stale_thinking_budgets()
        return after_forward

    def _prepare_inputs(
        self, scheduler_output: Any, num_scheduled_tokens: np.ndarray
    ) -> tuple[Any, ...]:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if not scheduler_output.scheduled_spec_decode_tokens:
            self.tree_step = TreeStep.without_drafts(*self.state.row_bounds())
            if self.proposed_trees:
                # The scheduler dropped them.
                for req_id in self.state.req_ids:
                    self.proposed_trees.pop(req_id, None)
            return prepared
        kept_nodes = getattr(scheduler_output, KEPT_NODES_ATTRIBUTE, {})
        self.tree_step = TreeStep(
            [
                self._step_request(rows, kept_nodes.get(rows.req_id))
                for rows in self.state.scheduled_rows(scheduler_output)
            ]
        )
        # Slots stay linear (super computed them); only rotary positions follow depth.
        self.tree_backend.set_positions(self.state.positions, self.tree_step)
        return prepared

    def _step_request(self, rows: ScheduledRows, kept_nodes: list[int] | None) -> StepRequest:
        return StepRequest(
            first_row=rows.first_row,
            root_row=rows.end_row - len(rows.draft_tokens) - 1,
            end_row=rows.end_row,
            num_computed=rows.num_computed,
            tree=self._tree_for(rows.req_id, rows.draft_tokens, kept_nodes),
        )

    def _tree_for(self, req_id: str, tokens: Any, kept_nodes: list[int] | None) -> DraftTree | None:
        """The tree behind scheduled draft tokens, cut to what was scheduled.

        `kept_nodes` are the nodes a grammar left of it; None where no grammar was moved along it.

        None when they are not: their rows are linear and none of them is accepted. vLLM pads
        resumed requests with drafts of -1; anything else that does not match is a fault.
        """
        tree = self.proposed_trees.pop(req_id, None)
        if not tokens:
            return DraftTree.empty()
        if all(token == PLACEHOLDER_TOKEN_ID for token in tokens):
            return None
        if tree is not None:
            nodes = list(range(len(tokens))) if kept_nodes is None else kept_nodes
            is_inside = bool(nodes) and nodes[-1] < tree.num_nodes
            if is_inside and tree.token_ids[nodes].tolist() == list(tokens):
                tree = tree.prefix(len(nodes)) if kept_nodes is None else tree.subset(nodes)
                if kept_nodes is not None or tree.is_chain or req_id not in self.tree_constrained:
                    return tree
                # vLLM took the drafts for a line: the masks of their rows are not those of nodes.
                self.tree_metrics.stats.observe_plain("grammar")
                return None
        self.tree_metrics.stats.observe_plain("unmatched")
        logger.error_once(
            "Rank %d has no tree for %d scheduled draft tokens; such drafts are computed and none "
            "of them is accepted. This costs speed, never a token; please report it. Counted as "
            'specplug:plain_steps_total{reason="unmatched"}.',
            get_tensor_model_parallel_rank(),
            len(tokens),
        )
        return None

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        attn_metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if common is not None:
            self.tree_backend.attach(
                attn_metadata,
                self.tree_step,
                common,
                for_capture=bool(kwargs.get("for_cudagraph_capture")),
                padded_requests=kwargs.get("num_reqs_padded"),
            )
            names = self.drafter.state_layers.names
            if names and not kwargs.get("for_cudagraph_capture"):
                if self.tree_step.has_drafts:
                    self.tree_states = state_step(self.tree_step)
                step = self.tree_states or self.rehearsed_states
                if step is not None:
                    attach_state_step(attn_metadata, names, step)
        return attn_metadata, common

    # -- after the forward ----------------------------------------------------------------

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        assert logits is not None and spec_decode_metadata is not None
        num_drafts = spec_decode_metadata.num_draft_tokens
        root_rows = [0] * len(num_drafts)
        for i in range(1, len(num_drafts)):
            root_rows[i] = root_rows[i - 1] + num_drafts[i - 1] + 1
        state = self.state
        sampler = TargetSampler(
            state.sampler,
            logits,
            state.sampling_metadata,
            state.outputs,
            state.discarded(),
            at_once=logits.device.type != "cpu",
            ends_request=state.ends_request,
        )
        step = self.tree_step
        if not step.has_drafts:
            _, output = sampler.walk([None] * len(root_rows), root_rows)
            self._record_verification(time.perf_counter())
            return output
        walk, output = sampler.walk([r.tree for r in step.requests], root_rows)
        for request, path in zip(step.requests, walk.accepted_paths, strict=True):
            request.accepted_path = path
        # Both before anything can read or hash their blocks. What applies to states is part of
        # verification, as in a calibration: it costs by tree and not by what moves.
        if self.tree_states is not None:
            lengths = accepted_lengths(self.tree_step)
            self.tree_states.commit(last_state_rows(self.tree_step), *lengths)
            self.tree_states = None
        walked = time.perf_counter()
        self.tree_backend.compact(step, state)
        self._record_verification(walked)
        return output

    def _get_mamba_bufs(self) -> Any:
        # Nor at the end of a block is there a state of a draft for vLLM to copy.
        self.speculative_config: Any = None
        try:
            return super()._get_mamba_bufs()
        finally:
            self.speculative_config = self.tree_spec

    def _update_states_after_model_execute(self, *args: Any, **kwargs: Any) -> None:
        # It counts how many states of drafts the next step is to pass over.
        if not self.drafter.state_layers.names:
            super()._update_states_after_model_execute(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM rewinds the generators of discarded samples, which a CPU generator cannot do, and
        # these were never advanced: hide them.
        with self.state.discarded_generators_hidden():
            return super()._bookkeeping_sync(*args, **kwargs)

    def _get_nans_in_logits(self, logits: torch.Tensor | None) -> dict[str, int]:
        if logits is None or not self.tree_step.has_drafts:
            return super()._get_nans_in_logits(logits)
        # vLLM takes row i for request i. What a rejected draft computed concerns nobody.
        nans, root = logits.isnan().sum(-1).tolist(), 0
        worst = []
        for request in self.tree_step.requests:
            rows = [root, *(root + 1 + node for node in request.accepted_path)]
            worst.append(max(rows, key=nans.__getitem__))
            root += request.end_row - request.root_row
        return super()._get_nans_in_logits(logits[worst])

    # -- drafting -------------------------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # vLLM's rule is for the whole batch; `_draft_requests` limits the depth of each request.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        drafter, req_ids = self.drafter.drafter, self.state.req_ids
        self._show(aux_hidden_states, hidden_states)
        drafts: list[list[int]] = [[] for _ in req_ids]
        # All ranks wait for the trees of the first one.
        may_rest = get_tensor_model_parallel_world_size() == 1 and all(sampled_token_ids)
        if may_rest and self.planner.rests(req_ids):
            return drafts
        requests, batch = self._draft_requests(sampled_token_ids)
        batch.req_ids = req_ids if may_rest else ()
        trees = self.planner.draft(
            drafter, requests, batch, show_committed=self.committed_steps.flush
        )
        trees = first_rank_trees(trees, requests.budgets)
        for i, tree in zip(requests.req_indices, trees, strict=True):
            if tree.num_nodes:
                self.proposed_trees[req_ids[i]] = tree
                drafts[i] = tree.token_ids.tolist()
        return drafts

    def _show(
        self, aux_hidden_states: list[torch.Tensor] | None, hidden_states: torch.Tensor
    ) -> None:
        """Lets the drafter see what the step committed, now or once it needs to."""
        step, req_ids = self.tree_step, self.state.req_ids
        slots = self.state.slots(self.draft_group)
        if self.committed_steps.is_late:
            # The next step's are written to the same place.
            slots = slots[: step.requests[-1].end_row].clone()
        new = [i for i, req_id in enumerate(req_ids) if req_id not in self.begun]
        self.committed_steps.add(
            partial(
                self._committed_tokens, step, list(req_ids), aux_hidden_states, hidden_states,
                slots, self._next_tokens(),
            )
        )  # fmt: skip
        if not new:
            return
        self.committed_steps.flush()
        self.begun.update(req_ids)
        if self.state.device.type == "cpu":
            for i in new:
                self.drafter.drafter.begin(req_ids[i], i, step.requests[i].num_computed)

    def _committed_tokens(
        self,
        step: TreeStep,
        req_ids: list[str],
        aux_hidden_states: list[torch.Tensor] | None,
        hidden_states: torch.Tensor,
        slots: torch.Tensor,
        next_tokens: torch.Tensor | None,
    ) -> CommittedTokens:
        rows, slot_rows, positions = step.committed_rows()
        device = self.state.device
        return CommittedTokens(
            aux_hidden_states=aux_hidden_states or [],
            rows=to_device(rows, device),
            positions=to_device(positions, device),
            slots=slots[to_device(slot_rows, device)],
            last_rows=torch.from_numpy(step.last_rows()),
            next_token_ids=next_tokens,
            output_states=hidden_states,
            req_ids=req_ids,
            owners=step.owners(),
            in_order=len(rows) == step.requests[-1].end_row,
        )

    def _next_tokens(self) -> torch.Tensor | None:
        """The token after each committed one, int64 [M], for drafters that read it."""
        if not self.tree_spec.reads_next_tokens:
            return None
        known = [self.state.token_ids(i) for i in range(len(self.tree_step.requests))]
        return to_device(self.tree_step.next_tokens(known), self.state.device)

    def take_draft_token_ids(self) -> Any:
        """The drafts for the scheduler, with the parents of those that a grammar constrains."""
        drafts = super().take_draft_token_ids()
        if drafts is not None:
            parents = {}
            for req_id, tree in self.proposed_trees.items():
                if req_id in self.tree_constrained:
                    parents[req_id] = tree.parent_indices.tolist()
            setattr(drafts, PARENTS_ATTRIBUTE, parents)
        return drafts

    def _draft_requests(self, sampled_token_ids: list[list[int]]) -> tuple[DraftRequests, Batch]:
        """Which requests are drafted for, from which anchors, how much each may draft, and what
        else the next step holds."""
        requests, batch = DraftRequests(), Batch()
        running = sum(1 for tokens in sampled_token_ids if tokens)
        penalties = draft_penalties(self.state.logits_processors)
        for i, tokens in enumerate(sampled_token_ids):
            request = self.state.request(i)
            num_tokens = request.num_tokens
            if not tokens:
                # A prompt that continues in the next step.
                step = self.tree_step.requests[i]
                done = step.num_computed + step.end_row - step.first_row
                rows = min(num_tokens - done, self.state.max_rows - running)
                batch.other_rows += rows
                batch.other_context += rows * (done + rows // 2)
                continue
            batch.num_roots += 1
            batch.root_context += num_tokens
            if not request.is_text:
                # Embeddings have no ids; in their places lie those of an earlier request.
                self.tree_metrics.stats.observe_plain("embeds")
                continue
            nodes, reason = self.planner.nodes_for(
                request.req_id, request.extra_args, num_tokens, running
            )
            # The step after this one always emits a token of its own.
            depth = min(request.tokens_left - 1, nodes)
            if depth < 1:
                reason = reason if nodes < 1 else "near_max_len"
                self.tree_metrics.stats.observe_plain(reason)
                continue
            requests.req_ids.append(request.req_id)
            requests.token_ids.append(request.token_ids)
            requests.context_lens.append(num_tokens - 1)
            requests.req_indices.append(i)
            requests.budgets.append(nodes)
            requests.widths.append(self.drafter.options.tree_width)
            requests.depths.append(depth)
            requests.penalties.append(penalties.get(i))
        return requests, batch

    def _record_verification(self, walked: float) -> None:
        stats = self.tree_metrics.stats
        if self.planner.is_resting and not self.tree_step.has_drafts:
            return
        step_nodes = 0
        requests = self.tree_step.requests
        for r, adapter in zip(requests, self.state.adapter_names(len(requests)), strict=True):
            if r.tree is not None and r.tree.num_nodes:
                stats.observe_draft(r.tree.num_nodes, len(r.accepted_path), adapter)
                step_nodes += r.tree.num_nodes
        self.planner.observe(self.tree_step, self.state.req_ids, walked)
        if step_nodes:
            stats.observe_step_nodes(step_nodes)
            stats.observe_ms("compact", 1e3 * (time.perf_counter() - walked))
