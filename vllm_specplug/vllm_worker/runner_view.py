# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner seen from outside: its engine, forwards beside its steps, its caches.

What calibration, draft forwards and drafters' caches need to know of the runner, they ask here and
get as plain values.

Seam: runner_state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_specplug.drafting.drafter import DrafterOptions
from vllm_specplug.kernels import to_device
from vllm_specplug.vllm_attention.state_rows import StateStep, warmup_step
from vllm_specplug.vllm_worker.cost.step_clock import StepClock
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup, target_groups
from vllm_specplug.vllm_worker.target.state_layers import StateLayers

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter
    from vllm_specplug.drafting.requests import DraftRequests


class RunnerView:
    """A model runner, or a subclass's instance, seen from outside.

    Args:
        runner: vLLM's runner with `TreeRunnerMixin`.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    # -- the engine -----------------------------------------------------------------------

    @property
    def vllm_config(self) -> Any:
        return self.runner.vllm_config

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def dtype(self) -> torch.dtype:
        return self.runner.dtype

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    @property
    def max_requests(self) -> int:
        """Most requests of a batch."""
        return self.runner.max_num_reqs

    @property
    def max_rows(self) -> int:
        """Most rows of a forward."""
        return self.runner.max_num_tokens

    @property
    def vocab_size(self) -> int:
        return self.runner.model_config.get_vocab_size()

    @property
    def hidden_size(self) -> int:
        return self.runner.model_config.get_hidden_size()

    @property
    def num_query_heads(self) -> int:
        """Query heads of the target on this rank."""
        runner = self.runner
        return runner.model_config.get_num_attention_heads(runner.parallel_config)

    @property
    def drafter(self) -> Drafter:
        return self.runner.drafter.drafter

    @property
    def state_layers(self) -> StateLayers:
        """The target's layers that keep a recurrent state."""
        layers: StateLayers = self.runner.drafter.state_layers
        return layers

    def state_step(self, requests: Any, parents: torch.Tensor) -> StateStep:
        """A step's trees in those layers; `parents` on the host."""
        make: type[StateStep] = self.runner.tree_backend.state_step
        return make(requests, to_device(parents.numpy(), self.device))

    @property
    def drafter_options(self) -> DrafterOptions:
        return self.runner.drafter.options

    # -- forwards beside the step ---------------------------------------------------------

    def dummy_forward(self, rows: int, context: int) -> torch.Tensor:
        """A forward of `rows` rows that attend `context` tokens; hidden states [>= rows, H]."""
        # vLLM makes a request of each row while there are slots, and puts the context before it.
        longest = -(-rows // min(rows, self.max_requests))
        hidden, _ = self.runner._dummy_run(rows, context_len=max(0, context - longest))
        return hidden

    def tree_forward(self, rows: int, context: int) -> torch.Tensor:
        """`dummy_forward` whose rows are trees to attention on a CPU, and to layers with a state,
        the accepted paths applied.

        Rows of other kinds are taken elsewhere, at other costs. One row is a decoding one.
        """
        if rows == 1:
            return self.dummy_forward(rows, context)
        backend = self.runner.tree_backend
        backend.warmup_rows = self.drafter_options.num_nodes + 1
        try:
            return self._state_forward(rows, context)
        finally:
            backend.warmup_rows = 0

    @property
    def is_host(self) -> bool:
        """Whether forwards run on the CPU."""
        return self.device.type == "cpu"

    def trees_forward(self, trees: int, context: int) -> None:
        """Runs a forward of `trees` requests with as many rows as the largest tree, which attend
        `context` tokens. Not for layers with a state."""
        rows = self.drafter_options.num_nodes + 1
        self.runner._dummy_run(
            trees * rows, uniform_decode=True, context_len=max(0, context - rows)
        )

    def _state_forward(self, rows: int, context: int) -> torch.Tensor:
        if not self.state_layers.names:
            return self.dummy_forward(rows, context)
        most = self.drafter_options.num_nodes + 1
        step = warmup_step(rows, self.max_requests, most, self.state_step)
        self.runner.step.warmup_states = step
        try:
            hidden = self.dummy_forward(rows, context)
        finally:
            self.runner.step.warmup_states = None
        step.commit(step.starts[1:] - 1)
        return hidden

    def draft(self, requests: DraftRequests) -> None:
        """A draft forward for requests of no batch, as steps have it."""
        graphs = getattr(self.runner.speculator, "draft_graphs", None)
        if graphs is None or not graphs.warmup(requests):
            self.drafter.propose(requests)

    @property
    def clock(self) -> StepClock:
        """Of what computes the forwards."""
        clock: StepClock = self.runner.planner.clock
        return clock

    def wait_for_device(self) -> None:
        """Returns when the device is idle."""
        if not self.is_host:
            torch.accelerator.synchronize()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits [rows, V] of hidden states [rows, H], by no request's adapter."""
        if self.runner.lora_config is not None:
            # The LM head takes adapters row by row, and is mapped to those of the last forward.
            rows = np.array([len(hidden)], np.int32)
            with self.runner.maybe_select_dummy_loras(
                self.runner.lora_config, rows, num_sampled_tokens=rows
            ):
                return self.runner.model.compute_logits(hidden)
        return self.runner.model.compute_logits(hidden)

    @contextmanager
    def dummy_adapters(self) -> Iterator[None]:
        """Dummy forwards inside find as many LoRA adapters as a batch may have; none stays."""
        config = self.runner.lora_config
        if config is None:
            yield
            return
        try:
            with self.runner.maybe_setup_dummy_loras(config):
                # Dummy forwards make adapters and remove them, every one of them.
                self.runner.has_dummy_adapters = True
                try:
                    yield
                finally:
                    self.runner.has_dummy_adapters = False
        finally:
            # vLLM leaves them behind a failure, and their numbers are those of real adapters.
            self.runner.maybe_remove_all_loras(config)

    def adapters(self, req_indices: Sequence[int]) -> tuple[list[int], set[Any]]:
        """LoRA ids of requests of the batch, 0 for none, and vLLM's requests for those adapters."""
        ids, requests = self.runner.step.adapters
        # Dummy requests are in no batch.
        return [ids[i] if i < len(ids) else 0 for i in req_indices], requests

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: dict[str, Any],
        req_indices: Sequence[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The target's forward with `attention` metadata by layer; writes no cache.

        Args:
            req_indices: whose row each is, by the request's index in the batch.

        Returns:
            Hidden states [rows, H] and those of the layers that the drafter reads.
        """
        if self.runner.lora_config is not None:
            ids, requests = self.adapters(req_indices)
            self.runner._set_active_loras(tuple(ids), tuple(ids), requests)
        # A compiled model has one way in, and with this option it is embeddings.
        takes_embeds = self.vllm_config.model_config.enable_prompt_embeds
        embeds = self.runner.model.embed_input_ids(input_ids) if takes_embeds else None
        with set_forward_context(
            attention, self.vllm_config, num_tokens=len(input_ids), slot_mapping={}
        ):
            return self.runner.model(
                input_ids=None if takes_embeds else input_ids,
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=embeds,
            )

    # -- caches ---------------------------------------------------------------------------

    @property
    def layers(self) -> dict[str, Any]:
        """vLLM's static forward context: the target's layers and the drafter's, of all kinds."""
        return self.runner.compilation_config.static_forward_context

    @property
    def kv_cache_config(self) -> Any:
        """vLLM's, once caches exist."""
        return self.runner.kv_cache_config

    def target_groups(self) -> list[CacheGroup]:
        """KV cache groups with layers of the target."""
        return target_groups(self.kv_cache_config, self.layers)

    def target_caches(self) -> dict[str, torch.Tensor]:
        """The target's caches by layer, group by group; vLLM's pages."""
        return {name: c for group in self.target_groups() for name, c in group.caches.items()}

    def full_attention_pages(self) -> list[tuple[int, int]]:
        """(tokens, bytes) of a page of each layer with full attention, draft layers included."""
        specs = self.runner.get_kv_cache_spec().values()
        return [
            (s.block_size, s.page_size_bytes) for s in specs if isinstance(s, FullAttentionSpec)
        ]

    def block_table(self, group: int = 0) -> torch.Tensor:
        """int32 [slots, max_blocks] in a KV cache group on the device: requests of the batch come
        first, in its order."""
        table: torch.Tensor = self.runner.block_tables.input_block_tables[group]
        return table
