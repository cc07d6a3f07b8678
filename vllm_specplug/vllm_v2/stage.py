# SPDX-License-Identifier: Apache-2.0
"""What every pipeline stage needs to verify trees in its layers of the target.

    stage     mixin             runner on a CPU     runner on CUDA
    earlier   StageRunnerMixin  CPUStageRunner      GPUStageRunner
    last      TreeRunnerMixin   TreeCPUModelRunner  TreeGPUModelRunner

Without pipeline parallelism the only stage is the last one. An earlier stage neither samples nor
drafts: `stage_relay` brings it the accepted paths and the next trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

from vllm_specplug.drafting.requests import device_tensor
from vllm_specplug.registry import headless_methods
from vllm_specplug.tree.step_trees import TreeStore, attach_trees, set_positions
from vllm_specplug.vllm_attention.layer_support import check_cache_dtypes
from vllm_specplug.vllm_v2.backend import CpuTreeBackend, TreeBackend
from vllm_specplug.vllm_v2.model_state import with_trees
from vllm_specplug.vllm_v2.stage_relay import StageRelay
from vllm_specplug.vllm_v2.step_context import StepContext
from vllm_specplug.vllm_v2.step_input import step_rows
from vllm_specplug.vllm_worker.frames import with_room_for_callees
from vllm_specplug.vllm_worker.proposer import DrafterHost
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.target.layer_states import collect_layer_states
from vllm_specplug.vllm_worker.target.state_layers import check_state_blocks

if TYPE_CHECKING:
    # `vllm.v1.worker.gpu.model_runner.GPUModelRunner` or a subclass.
    _Runner: Any
else:
    _Runner = object


class StageRunnerMixin(_Runner):
    """Verifies trees in one pipeline stage.

    Put it before V2's `GPUModelRunner` or a subclass of it. `runner.TreeRunnerMixin` extends it for
    the last stage.
    """

    model_state: Any

    def __init__(self, vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, device, *args, **kwargs)
        self.tree_spec = vllm_config.speculative_config
        self.tree_backend = self.make_tree_backend()
        # Shared with the model state, and on the last stage with the sampler and the speculator.
        self.step = StepContext()
        # None without pipeline parallelism.
        self.relay: StageRelay | None = None
        if self.use_pp:
            self.relay = StageRelay(self.pp_handler, self.tree_store, self.tree_backend)

    # -- set-up ---------------------------------------------------------------------------

    def make_tree_backend(self) -> TreeBackend:
        """Returns the backend that verifies trees on this device."""
        return CpuTreeBackend()

    @cached_property
    def state(self) -> RunnerView:
        """This runner as the rest of the package sees it."""
        return RunnerView(self)

    @cached_property
    def drafter(self) -> DrafterHost:
        """The host of the method's drafter and draft layers, which only the last stage loads."""
        return DrafterHost(self.vllm_config)

    @cached_property
    def tree_store(self) -> TreeStore:
        """The trees of running requests."""
        config = self.vllm_config
        return TreeStore(
            config.scheduler_config.max_num_seqs,
            config.speculative_config.num_speculative_tokens,
            config.model_config.get_vocab_size(),
            self.device,
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.tree_spec.aux_layers:
            self._return_layer_states()
        self.drafter.load_model(self.model)
        names = self.drafter.state_layers.names
        self.moves_states = bool(names) and self.cache_config.mamba_cache_mode == "align"
        self.model_state = with_trees(
            self.model_state, self.step, self.tree_backend, self.state.layers, names,
            self.moves_states,
        )  # fmt: skip

    def _return_layer_states(self) -> None:
        """Makes the model return the outputs of the layers that the drafter reads. Call it after
        vLLM's own loading, which would choose the layers of one of its own heads.

        Raises:
            ValueError: if the model cannot pass these outputs on to later pipeline stages.
        """
        spec, model = self.tree_spec, self.model
        method = str(spec.plugin_method)
        self.use_aux_hidden_state_outputs = True
        if not self.use_pp:
            if not collect_layer_states(model, spec.aux_layers, self.vllm_config, method):
                model.set_aux_hidden_state_layers(spec.aux_layers)
            return
        try:
            eagle3_utils.verify_supports_aux_hidden_states_over_pp(model, method)
        except ValueError as error:
            raise ValueError(
                f"{error}: its class does not pass outputs of layers on to later stages. Use "
                "pipeline_parallel_size=1 with tensor parallelism, or a method without a head: "
                f"{', '.join(headless_methods())}."
            ) from None
        model.set_aux_hidden_state_layers(spec.aux_layers)
        self.pp_handler.configure_aux_hidden_state_relay(model)
        eagle3_utils.reserve_aux_intermediate_tensor_slots(model)
        if not self.is_first_pp_rank:
            # vLLM's own tensors, made while it loaded the model, lack these outputs.
            self.intermediate_tensors = model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.dtype, device=self.device
            )

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if kwargs.get("is_profiling") or (args and args[0]):
            # vLLM measures graphs with a small cache and then drops it: keep no reference to it.
            return
        self.bind_caches()

    def bind_caches(self) -> None:
        """Checks the caches that vLLM has allocated, and gives them to the tree backend."""
        state, method = self.state, str(self.tree_spec.plugin_method)
        check_cache_dtypes(state.target_caches(), state.dtype, method, state.layers)
        check_state_blocks(state.kv_cache_config, self.tree_spec.num_speculative_tokens, method)
        self.tree_backend.bind(state.target_groups())
        self.tree_backend.block_tables = [table.gpu for table in self.block_tables.block_tables]

    def start_budget(self) -> None:
        """Measures step costs for an adaptive budget; does nothing on a stage that does not draft.

        Call it once the model is ready to serve.
        """

    # -- before the forward -----------------------------------------------------------------

    @with_room_for_callees
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.step.begin()
        return super().execute_model(*args, **kwargs)

    def update_pp_decode_requests(self) -> None:
        if self.relay is not None and self.pp_handler.queue:
            # vLLM's own method removes the entry.
            self.relay.take_over(self.pp_handler.queue[0])
        super().update_pp_decode_requests()

    # As in steps: caches may be inference tensors, which nothing else may write.
    @torch.inference_mode()
    def settle(self) -> None:
        """Takes over the results of all steps in flight. Call it when the engine is paused."""
        if self.relay is not None:
            self.relay.settle()

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        if scheduler_output.scheduled_new_reqs:
            self.tree_store.clear(self.slots_of(scheduler_output.scheduled_new_reqs))

    def slots_of(self, requests: Sequence[Any]) -> torch.Tensor:
        """Returns the slots int64 [R] of running requests."""
        indices = [self.req_states.req_id_to_index[request.req_id] for request in requests]
        return device_tensor(indices, self.device)

    def prepare_attn(self, input_batch: Any) -> Any:
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        # Slots stay linear; rotary positions follow depth.
        self.step.slots = slot_mappings
        self.step.logits_counts = np.diff(input_batch.cu_num_logits_np)
        if input_batch.num_draft_tokens:
            rows = step_rows(input_batch, self.num_speculative_steps)
            self.step.trees = trees = attach_trees(self.tree_store, rows)
            set_positions(trees, input_batch.positions)
        return block_tables, slot_mappings

    def _set_active_loras(
        self, prompt_mapping: tuple[int, ...], token_mapping: Any, requests: set[Any], *args: Any
    ) -> None:
        # vLLM maps one logits row per request to its adapter; a tree also has one per node.
        counts, self.step.logits_counts = self.step.logits_counts, None
        if counts is not None:
            self.step.adapters = prompt_mapping, requests
            prompt_mapping = tuple(np.repeat(prompt_mapping, counts).tolist())
        super()._set_active_loras(prompt_mapping, token_mapping, requests, *args)

    # -- after the forward -------------------------------------------------------------------

    @with_room_for_callees
    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        running = self.execute_model_state
        output = super().sample_tokens(*args, **kwargs)
        if self.relay is not None and running is not None:
            self.relay.exchange(running.input_batch, self.step)
        return output
