# SPDX-License-Identifier: Apache-2.0
"""What this package knows of vLLM's V1 runner: its private state, read here and nowhere else.

The mixin overrides the runner's methods; what those methods, the calibration, warm-up and draft
forwards need to know of the runner, they ask here and get as plain values.

Seam: runner_state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_specplug.drafting.drafter import DrafterOptions
from vllm_specplug.vllm_worker.cache_groups import CacheGroup, target_groups

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter


@dataclass(frozen=True)
class ScheduledRows:
    """One request's rows in the coming forward."""

    req_id: str
    first_row: int
    end_row: int
    num_computed: int
    """Committed tokens in the cache before the step."""
    draft_tokens: Sequence[int]
    """Of the last rows, as the scheduler has them; -1 is padding."""


@dataclass(frozen=True)
class RequestState:
    """One request of the batch once a step's tokens are recorded."""

    req_id: str
    token_ids: np.ndarray
    """int32 [num_tokens], prompt and output; a view."""
    is_text: bool
    """Whether every token has an id; embeddings have none."""
    tokens_left: int
    """Tokens that the request may still emit."""
    extra_args: dict[str, Any] | None
    """Of its sampling parameters."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class RunnerState:
    """A V1 model runner, or a subclass's instance, seen from outside.

    Args:
        runner: vLLM's runner with `TreeRunnerMixin`.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.rehearsal_requests = 0
        """Rows of the block table that a draft forward without requests may read."""

    # -- the engine -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        return "V1"

    @property
    def vllm_config(self) -> Any:
        return self._runner.vllm_config

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def dtype(self) -> torch.dtype:
        return self._runner.dtype

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def max_requests(self) -> int:
        """Most requests of a batch."""
        return self._runner.max_num_reqs

    @property
    def max_rows(self) -> int:
        """Most rows of a forward."""
        return self._runner.max_num_tokens

    @property
    def vocab_size(self) -> int:
        return self._runner.model_config.get_vocab_size()

    @property
    def hidden_size(self) -> int:
        return self._runner.model_config.get_hidden_size()

    @property
    def num_query_heads(self) -> int:
        """Query heads of the target on this rank."""
        runner = self._runner
        return runner.model_config.get_num_attention_heads(runner.parallel_config)

    @property
    def drafter(self) -> Drafter:
        return self._runner.drafter.drafter

    @property
    def drafter_options(self) -> DrafterOptions:
        return self._runner.drafter.options

    @property
    def sampler(self) -> Any:
        """vLLM's sampler."""
        return self._runner.sampler

    # -- forwards beside the step ---------------------------------------------------------

    def dummy_forward(self, rows: int, context: int) -> torch.Tensor:
        """A forward of `rows` rows that attend `context` tokens; hidden states [>= rows, H]."""
        hidden, _ = self._runner._dummy_run(rows, force_attention=True, profile_seq_lens=context)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits [rows, V] of hidden states [rows, H]."""
        return self._runner.model.compute_logits(hidden)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: dict[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The target's forward with `attention` metadata by layer; writes no cache.

        Returns:
            Hidden states [rows, H] and those of the layers that the drafter reads.
        """
        with set_forward_context(
            attention, self.vllm_config, num_tokens=len(input_ids), slot_mapping={}
        ):
            return self._runner.model(
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )

    def wait_for_device(self) -> None:
        self._runner._sync_device()

    # -- caches ---------------------------------------------------------------------------

    @property
    def layers(self) -> dict[str, Any]:
        """vLLM's static forward context: the target's layers and the drafter's, of all kinds."""
        return self._runner.compilation_config.static_forward_context

    @property
    def kv_cache_config(self) -> Any:
        """vLLM's, once caches exist."""
        return self._runner.kv_cache_config

    def target_groups(self) -> list[CacheGroup]:
        """KV cache groups with layers of the target."""
        return target_groups(self.kv_cache_config, self.layers)

    def target_caches(self) -> dict[str, torch.Tensor]:
        """The target's caches by layer, group by group; vLLM's pages."""
        return {name: c for group in self.target_groups() for name, c in group.caches.items()}

    def full_attention_pages(self) -> list[tuple[int, int]]:
        """(tokens, bytes) of a page of each layer with full attention, draft layers included."""
        specs = self._runner.get_kv_cache_spec().values()
        return [
            (s.block_size, s.page_size_bytes) for s in specs if isinstance(s, FullAttentionSpec)
        ]

    def block_table(self, group: int = 0) -> torch.Tensor:
        """int32 [B, max_blocks] of the batch in a KV cache group, on the device."""
        batch = self._runner.input_batch
        table = batch.block_table[group]
        return table.get_device_tensor(batch.num_reqs or self.rehearsal_requests)

    def block_ids(self, group: int = 0) -> np.ndarray:
        """int32 [>= B, max_blocks] of the batch in a KV cache group, on the host."""
        return self._runner.input_batch.block_table[group].block_table.np

    def slots(self, group: int = 0) -> torch.Tensor:
        """int64 [>= T] cache slots of the step's rows in a KV cache group, on the device."""
        return self._runner.input_batch.block_table[group].slot_mapping.gpu

    # -- the batch ------------------------------------------------------------------------

    @property
    def req_ids(self) -> list[str]:
        """Requests of the batch, in order."""
        return self._runner.input_batch.req_ids

    def scheduled_rows(self, scheduler_output: Any) -> list[ScheduledRows]:
        """The rows of each request, in batch order, once inputs are prepared."""
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np
        drafts = scheduler_output.scheduled_spec_decode_tokens
        return [
            ScheduledRows(
                req_id,
                int(starts[i]),
                int(starts[i + 1]),
                int(batch.num_computed_tokens_cpu[i]),
                drafts.get(req_id, ()),
            )
            for i, req_id in enumerate(batch.req_ids)
        ]

    @property
    def positions(self) -> torch.Tensor:
        """Rotary positions of the coming forward's rows, int64; written in place."""
        return self._runner.positions

    @property
    def sampling_metadata(self) -> Any:
        """vLLM's, of the batch."""
        return self._runner.input_batch.sampling_metadata

    @property
    def outputs(self) -> list[list[int] | None]:
        """Each request's live output tokens, as vLLM's processors hold them."""
        return self._runner.input_batch.req_output_token_ids

    @property
    def logits_processors(self) -> list[Any]:
        """vLLM's logits processors that can change an argmax."""
        return self._runner.input_batch.logitsprocs.non_argmax_invariant

    def discarded(self) -> set[int]:
        """Requests, by index, whose sample is thrown away: their prompts go on."""
        mask = self._runner.discard_request_mask.np[: self._runner.input_batch.num_reqs]
        return set(np.nonzero(mask)[0].tolist())

    @contextmanager
    def discarded_generators_hidden(self) -> Iterator[None]:
        """Without the random generators of discarded samples in the batch."""
        generators = self._runner.input_batch.generators
        hidden = {i: generators.pop(i) for i in self.discarded() if i in generators}
        try:
            yield
        finally:
            generators.update(hidden)

    def is_constrained(self, req_id: str) -> bool:
        """Whether a request's output must follow a grammar."""
        state = self._runner.requests.get(req_id)
        params = None if state is None else state.sampling_params
        return params is not None and params.structured_outputs is not None

    def ends_request(self, index: int, token_id: int) -> bool:
        """Whether vLLM ends the request at `index` of the batch once it emits this token."""
        params = self._runner.requests[self.req_ids[index]].sampling_params
        if params is None:
            return False
        return token_id == params.eos_token_id or token_id in (params.stop_token_ids or ())

    def request(self, index: int) -> RequestState:
        """The request at `index` of the batch, with the step's tokens."""
        runner, batch = self._runner, self._runner.input_batch
        state = runner.requests[batch.req_ids[index]]
        params = state.sampling_params
        num_tokens = int(batch.num_tokens_no_spec[index])
        left = runner.max_model_len - num_tokens
        if params is not None and params.max_tokens is not None:
            left = min(left, params.max_tokens - len(state.output_token_ids))
        is_token = batch.is_token_ids[index, :num_tokens]
        return RequestState(
            req_id=state.req_id,
            token_ids=batch.token_ids_cpu[index, :num_tokens],
            is_text=not runner.enable_prompt_embeds or bool(is_token.all()),
            tokens_left=left,
            extra_args=None if params is None else params.extra_args,
        )
