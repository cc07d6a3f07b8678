# SPDX-License-Identifier: Apache-2.0
"""The mixin that turns vLLM's Model Runner V2 into one that drafts and verifies trees.

vLLM's scheduler stays stock and takes the N nodes of a tree for N draft tokens. The host reads
nothing between the start of a step and its emitted tokens, so steps may be scheduled ahead. The
overrides below follow the order of a step; those that every pipeline stage needs are in `stage`.
Seams: runner_*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from vllm_specplug.drafting.step_report import REPORT_ATTRIBUTE, StepReport
from vllm_specplug.options import RowBudget
from vllm_specplug.tree.draft_tree import PARENTS_ATTRIBUTE
from vllm_specplug.vllm_v2.sampler import TreeSampler
from vllm_specplug.vllm_v2.speculator import TreeSpeculator
from vllm_specplug.vllm_v2.stage import StageRunnerMixin
from vllm_specplug.vllm_v2.state_trees import commit_paths
from vllm_specplug.vllm_v2.stop_tokens import MAX_STOP_TOKENS, StopTokens, stop_tokens_of
from vllm_specplug.vllm_v2.tree_params import put_on_trees
from vllm_specplug.vllm_worker.cost.calibration import start_budget
from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner, step_metrics
from vllm_specplug.vllm_worker.frames import with_room_for_callees
from vllm_specplug.vllm_worker.memory.cache_groups import draft_group
from vllm_specplug.vllm_worker.memory.draft_cache import DraftKVLayer
from vllm_specplug.vllm_worker.memory.drafter_memory import bind_drafter_memory
from vllm_specplug.vllm_worker.memory.kv_transfer import CommittedSaves


class TreeOutput(AsyncOutput):
    """A step's output; `get_output` also reports the number of nodes of each tree."""

    tree_nodes: Callable[[], dict[str, int]]

    def get_output(self) -> Any:
        output = super().get_output()
        getattr(output, REPORT_ATTRIBUTE).tree_nodes = self.tree_nodes()
        return output


def make_speculator(stock: Any) -> Any:
    """Replaces `init_speculator` in a tree runner on a CPU. Seam: speculator."""
    return TreeSpeculator


def _plain_reason(request: Any, stop_tokens: set[int]) -> str | None:
    """Returns why a request decodes without drafts; None if it may have drafts."""
    if len(stop_tokens) > MAX_STOP_TOKENS:
        return "no_draft"
    if request.sampling_params.repetition_detection is not None:
        # It may end a request at any token, and vLLM would count accepted tokens behind the end as
        # computed.
        return "no_draft"
    return None if request.prompt_embeds is None else "embeds"


class TreeRunnerMixin(StageRunnerMixin):
    """Samples, walks and drafts on the last pipeline stage.

    Put it before V2's `GPUModelRunner` or a subclass of it.
    """

    speculator: TreeSpeculator

    def __init__(self, vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, device, *args, **kwargs)
        self.tree_metrics = step_metrics(self.tree_spec)
        self.planner = DraftPlanner(
            self.tree_spec,
            RowBudget.of(self.tree_spec, vllm_config.scheduler_config),
            self.tree_metrics.stats,
            self.model_config.get_vocab_size(),
            self.tree_backend.step_clock(),
        )
        self.stop_tokens = StopTokens(self.max_num_reqs, device)
        self.speculator.start(self)
        # Whether dummy LoRA adapters are loaded for a calibration.
        self.has_dummy_adapters = False
        # Running requests with a grammar, whose drafts go to the scheduler with their parents.
        self.tree_constrained: set[str] = set()

    # -- set-up ---------------------------------------------------------------------------

    def maybe_setup_dummy_loras(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_dummy_adapters:
            return nullcontext()
        return super().maybe_setup_dummy_loras(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        put_on_trees(self.sampler, self.step, self.num_speculative_steps)
        self.rejection_sampler = TreeSampler(self.sampler, self.step, self.stop_tokens)

    def bind_caches(self) -> None:
        super().bind_caches()
        state, method = self.state, str(self.tree_spec.plugin_method)
        self.step.draft_group = draft_group(state.kv_cache_config, state.layers, method)
        layers = self.drafter.cache_layers
        if layers:
            scale = layers[0].spec.head_dim ** -0.5
            table = partial(state.block_table, self.step.draft_group)
            state.drafter.bind_cache(self.tree_backend.draft_cache(layers, table, scale))
        bind_drafter_memory(state, method)
        if has_kv_transfer_group():
            self.saves = CommittedSaves(
                [(n, x) for n, x in state.layers.items() if isinstance(x, DraftKVLayer)],
                lambda: self.step.trees is not None,
            )

    @with_room_for_callees
    def start_budget(self) -> None:
        start_budget(self.planner, self.state)

    # -- before the forward -----------------------------------------------------------------

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        # A dummy step has no trees, and may come between any two steps.
        if not kwargs.get("dummy_run"):
            self.planner.begin_step()
        return super().execute_model(*args, **kwargs)

    def finish_requests(self, scheduler_output: Any) -> None:
        # Every step runs this, also the empty one that reports finished requests before the engine
        # goes idle. A new request may reuse the id of a finished one in the same step.
        ended = {*scheduler_output.finished_req_ids}
        ended.update(request.req_id for request in scheduler_output.scheduled_new_reqs)
        gone = ended.union(scheduler_output.preempted_req_ids or ())
        if gone:
            # Sorted: ranks must free their slots in the same order, and sets of strings have none.
            self.speculator.forget(sorted(gone), sorted(ended))
        self._note_grammars(scheduler_output)
        super().finish_requests(scheduler_output)

    def _note_grammars(self, scheduler_output: Any) -> None:
        """Updates the running requests with a grammar.

        A session, whose input goes on after an answer, keeps the grammar of its first turn;
        sampling parameters of later turns do not change it. vLLM ignores a grammar that only a
        later turn asks for; sending parents for such a request does no harm.
        """
        self.tree_constrained -= set(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            if request.sampling_params.structured_outputs is not None:
                self.tree_constrained.add(request.req_id)

    def add_requests(self, scheduler_output: Any) -> None:
        new = scheduler_output.scheduled_new_reqs
        with self._sessions_keep_their_states([request.req_id for request in new]):
            super().add_requests(scheduler_output)
        stops = [stop_tokens_of(request.sampling_params) for request in new]
        for request, ends in zip(new, stops, strict=True):
            self.speculator.add(
                request.req_id,
                request.sampling_params.extra_args,
                _plain_reason(request, ends),
                request.prefill_token_ids,
            )
        if new:
            self.stop_tokens.put(self.slots_of(new), stops)

    @contextmanager
    def _sessions_keep_their_states(self, req_ids: list[str]) -> Iterator[None]:
        """Keeps the recurrent states of sessions in place while vLLM adds requests.

        A session is a request whose input goes on after an answer. Its state stays in the block of
        the last step's last row, even if the accepted path did not reach that row.
        """
        if not self.moves_states:
            yield
            return
        blocks = self.model_state._mamba_state_idx_gpu
        index = self.req_states.req_id_to_index
        kept = {req_id: blocks[index[req_id]].clone() for req_id in req_ids if req_id in index}
        yield
        for req_id, block in kept.items():
            blocks[index[req_id]] = block

    # -- after the forward -------------------------------------------------------------------

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        output = super().sample(hidden_states, input_batch, grammar_output)
        # Commit states and caches before anything can read or hash their blocks. The clock counts
        # the states' commit as verification, as in a calibration: its cost depends on the trees,
        # not on the accepted paths.
        step, walk = self.step, self.step.walk
        if walk is not None and step.states is not None:
            assert step.trees is not None
            commit_paths(step.states, step.trees, walk)
        if walk is not None and self.speculator.schedules_ahead:
            # Taken before the next trees are drafted.
            step.tree_nodes = self.speculator.tree_nodes(input_batch.req_ids)
        step.walked = self.planner.clock.mark()
        if walk is not None and step.slots is not None:
            assert step.trees is not None
            self.tree_backend.compact(step.trees, walk, step.slots)
        step.compacted = self.planner.clock.mark()
        if self.tree_backend.is_host:
            self.speculator.learn(input_batch, walk, input_batch.seq_lens, self.speculator.trees)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        report = StepReport(self.tree_metrics.end_step(), self.speculator.reserved)
        if output is not None:
            if not self.speculator.schedules_ahead:
                report.drafts = self.take_draft_token_ids()
            setattr(output.model_runner_output, REPORT_ATTRIBUTE, report)
            if self.step.tree_nodes is not None:
                output.__class__, output.tree_nodes = TreeOutput, self.step.tree_nodes
        return output

    def take_draft_token_ids(self) -> Any:
        """Returns the drafts that the scheduler needs, one per tree node. The drafts of requests
        with a grammar carry their parents."""
        if self.use_pp:
            # vLLM returns the drafts of the last batch, but the scheduler may wait for another one.
            # It needs only the drafts of requests with a grammar.
            trees = {req_id: self.speculator.tree_of(req_id) for req_id in self.tree_constrained}
            drafts = DraftTokenIds(
                list(trees), [[] if t is None else t.token_ids.tolist() for t in trees.values()]
            )
        else:
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
        return drafts
