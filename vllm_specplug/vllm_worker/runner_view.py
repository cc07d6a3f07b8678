# SPDX-License-Identifier: Apache-2.0
"""The rest of the package's interface to vLLM's V2 model runner.

Calibration, draft forwards and drafters' caches read the runner's state here, as plain values, and
run forwards outside of its steps.

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

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import DrafterOptions
from vllm_specplug.vllm_attention.state_rows import warmup_step
from vllm_specplug.vllm_worker.cost.step_clock import StepClock
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup, target_groups
from vllm_specplug.vllm_worker.target.state_layers import StateLayers

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter
    from vllm_specplug.drafting.requests import DraftRequests


class RunnerView:
    """The interface to one model runner.

    Args:
        runner: vLLM's runner with `StageRunnerMixin`. Members that draft or measure need
            `TreeRunnerMixin`.
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
        """Maximum requests of a batch."""
        return self.runner.max_num_reqs

    @property
    def max_rows(self) -> int:
        """Maximum rows of a forward."""
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
        """The target's layers with a recurrent state."""
        layers: StateLayers = self.runner.drafter.state_layers
        return layers

    @property
    def drafter_options(self) -> DrafterOptions:
        return self.runner.drafter.options

    # -- forwards beside the step ---------------------------------------------------------

    def dummy_forward(self, rows: int, context: int) -> torch.Tensor:
        """Runs `rows` dummy rows over `context` tokens and returns hidden states [>= rows, H]."""
        # vLLM creates one request per row while there are slots, and adds the context before it.
        longest = -(-rows // min(rows, self.max_requests))
        hidden: torch.Tensor = self._dummy_run(rows, context_len=max(0, context - longest))
        return hidden

    def tree_forward(self, rows: int, context: int) -> torch.Tensor:
        """Runs `dummy_forward` with rows that form trees in attention on a CPU and in layers with a
        recurrent state, and applies the accepted paths there.

        Plain rows would take other code with other costs. A single row is a decoding row.
        """
        if rows == 1:
            return self.dummy_forward(rows, context)
        backend, running = self.runner.tree_backend, self.runner.step
        most, step = self.drafter_options.num_nodes + 1, None
        if self.state_layers.names:
            step = warmup_step(rows, self.max_requests, most, backend.state_step, self.device)
        backend.warmup_rows, running.warmup_states = most, step
        try:
            hidden = self.dummy_forward(rows, context)
        finally:
            backend.warmup_rows, running.warmup_states = 0, None
        if step is not None:
            step.commit(step.starts[1:] - 1)
        return hidden

    @property
    def is_host(self) -> bool:
        """Whether forwards run on the CPU."""
        return self.device.type == "cpu"

    def trees_forward(self, trees: int, context: int) -> None:
        """Runs a forward of `trees` requests with the rows of the largest tree each, over `context`
        tokens. Not for layers with a recurrent state."""
        rows = self.drafter_options.num_nodes + 1
        self._dummy_run(trees * rows, uniform_decode=True, context_len=max(0, context - rows))

    def _dummy_run(self, rows: int, **options: Any) -> Any:
        """Returns the hidden states of vLLM's dummy forward over rows that take different experts,
        as in serving."""
        self.runner.step.has_dummy_rows = True
        if (received := self.runner.intermediate_tensors) is not None:
            # Later pipeline stages take these in place of random token ids.
            for tensor in received.tensors.values():
                tensor.normal_()
        try:
            return self.runner._dummy_run(rows, randomize_inputs=True, **options)[0]
        finally:
            self.runner.step.has_dummy_rows = False

    @property
    def drafts_on_device(self) -> bool:
        """Whether steps draft on the device, for `DeviceRequests`."""
        return not self.runner.tree_backend.is_host and self.drafter.drafts_on_device

    def draft(self, requests: DraftRequests | DeviceRequests) -> None:
        """Runs a draft forward for dummy requests, as a step would."""
        graphs = getattr(self.runner.speculator, "draft_graphs", None)
        if not isinstance(requests, DeviceRequests):
            self.drafter.propose(requests)
        elif graphs is None or graphs(requests) is None:
            self.drafter.propose_on_device(requests)

    @property
    def clock(self) -> StepClock:
        """The clock of the device that runs the forwards."""
        clock: StepClock = self.runner.planner.clock
        return clock

    def wait_for_device(self) -> None:
        """Returns when the device is idle."""
        if not self.is_host:
            torch.accelerator.synchronize()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the target's logits [rows, V] of hidden states [rows, H], without adapters."""
        if self.runner.lora_config is not None:
            # The LM head applies an adapter per row, and still has the last forward's mapping.
            rows = np.array([len(hidden)], np.int32)
            with self.runner.maybe_select_dummy_loras(
                self.runner.lora_config, rows, num_sampled_tokens=rows
            ):
                return self.runner.model.compute_logits(hidden)
        return self.runner.model.compute_logits(hidden)

    @contextmanager
    def dummy_adapters(self) -> Iterator[None]:
        """Loads as many dummy LoRA adapters as a batch may have, and removes them at the end."""
        config = self.runner.lora_config
        if config is None:
            yield
            return
        try:
            with self.runner.maybe_setup_dummy_loras(config):
                # Every dummy forward would make adapters and remove them.
                self.runner.has_dummy_adapters = True
                try:
                    yield
                finally:
                    self.runner.has_dummy_adapters = False
        finally:
            # After a failure vLLM keeps the dummies, whose ids may be those of real adapters.
            self.runner.maybe_remove_all_loras(config)

    def adapters(self, req_indices: Sequence[int]) -> tuple[list[int], set[Any]]:
        """Returns the LoRA ids of requests of the batch, 0 for none, and vLLM's LoRA requests."""
        ids, requests = self.runner.step.adapters
        # Dummy requests are not in the batch.
        return [ids[i] if i < len(ids) else 0 for i in req_indices], requests

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: dict[str, Any],
        req_indices: Sequence[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Runs the target's forward with `attention` metadata by layer. It writes no cache.

        Args:
            req_indices: batch index of each row's request.

        Returns:
            Hidden states [rows, H] and those of the layers that the drafter reads.
        """
        if self.runner.lora_config is not None:
            ids, requests = self.adapters(req_indices)
            self.runner._set_active_loras(tuple(ids), tuple(ids), requests)
        # A compiled model takes one kind of input: with this option, embeddings.
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
        """vLLM's KV cache config, once caches exist."""
        return self.runner.kv_cache_config

    def target_groups(self) -> list[CacheGroup]:
        """KV cache groups with layers of the target."""
        return target_groups(self.kv_cache_config, self.layers)

    def target_caches(self) -> dict[str, torch.Tensor]:
        """The target's caches (vLLM's pages) by layer, in the order of their groups."""
        return {name: c for group in self.target_groups() for name, c in group.caches.items()}

    def full_attention_pages(self) -> list[tuple[int, int]]:
        """Returns (tokens, bytes) of a page for each full-attention layer, draft layers too."""
        specs = self.runner.get_kv_cache_spec().values()
        return [
            (s.block_size, s.page_size_bytes) for s in specs if isinstance(s, FullAttentionSpec)
        ]

    def block_table(self, group: int = 0) -> torch.Tensor:
        """Returns the block table int32 [slots, max_blocks] of a KV cache group, on the device.
        The batch's requests come first, in order."""
        table: torch.Tensor = self.runner.block_tables.input_block_tables[group]
        return table
