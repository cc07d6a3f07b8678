# SPDX-License-Identifier: Apache-2.0
"""What this package knows of vLLM's V1 runner: its private state, read here and nowhere else.

The mixin overrides the runner's methods; what those methods, warm-up and draft forwards need to
know of the runner, they ask here and get as plain values.

Seam: runner_state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplug.vllm_worker.runner_view import RunnerView


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


class RunnerState(RunnerView):
    """A V1 model runner, or a subclass's instance, seen from outside.

    Args:
        runner: vLLM's runner with `TreeRunnerMixin`.
    """

    name = "V1"

    # -- the engine -----------------------------------------------------------------------

    @property
    def sampler(self) -> Any:
        """vLLM's sampler."""
        return self.runner.sampler

    # -- forwards beside the step ---------------------------------------------------------

    def dummy_forward(self, rows: int, context: int, **more: Any) -> torch.Tensor:
        lora = self.runner.lora_config
        hidden, _ = self.runner._dummy_run(
            rows,
            force_attention=True,
            profile_seq_lens=context,
            remove_lora=False,
            num_active_loras=0 if lora is None else lora.max_loras,
            **more,
        )
        return hidden

    def trees_forward(self, trees: int, context: int) -> None:
        rows = trees * (self.drafter_options.num_nodes + 1)
        self.dummy_forward(rows, context, uniform_decode=True)

    def adapters(self, req_indices: Sequence[int]) -> tuple[list[int], set[Any]]:
        batch = self.runner.input_batch
        ids = batch.request_lora_mapping[list(req_indices)].tolist()
        return ids, set(batch.lora_id_to_lora_request.values())

    def wait_for_device(self) -> None:
        self.runner._sync_device()

    # -- caches ---------------------------------------------------------------------------

    def block_table(self, group: int = 0) -> torch.Tensor:
        batch = self.runner.input_batch
        table = batch.block_table[group]
        return table.get_device_tensor(batch.num_reqs or self.rehearsal_requests)

    def block_ids(self, group: int = 0) -> np.ndarray:
        """int32 [>= B, max_blocks] of the batch in a KV cache group, on the host."""
        return self.runner.input_batch.block_table[group].block_table.np

    def slots(self, group: int = 0) -> torch.Tensor:
        """int64 [>= T] cache slots of the step's rows in a KV cache group, on the device."""
        return self.runner.input_batch.block_table[group].slot_mapping.gpu

    # -- the batch ------------------------------------------------------------------------

    @property
    def req_ids(self) -> list[str]:
        """Requests of the batch, in order."""
        return self.runner.input_batch.req_ids

    def scheduled_rows(self, scheduler_output: Any) -> list[ScheduledRows]:
        """The rows of each request, in batch order, once inputs are prepared."""
        batch = self.runner.input_batch
        starts = self.runner.query_start_loc.np
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

    def row_bounds(self) -> tuple[list[int], list[int]]:
        """Where the rows of each request begin and, last, end, [B + 1], and the tokens that each
        has in the cache, [B]; once inputs are prepared."""
        batch = self.runner.input_batch
        count = len(batch.req_ids)
        bounds: list[int] = self.runner.query_start_loc.np[: count + 1].tolist()
        return bounds, batch.num_computed_tokens_cpu[:count].tolist()

    @property
    def positions(self) -> torch.Tensor:
        """Rotary positions of the coming forward's rows, int64 [T] or, under M-RoPE, [axes, T];
        written in place."""
        if self.runner.uses_mrope:
            return self.runner.mrope_positions.gpu
        return self.runner.positions

    @property
    def sampling_metadata(self) -> Any:
        """vLLM's, of the batch."""
        return self.runner.input_batch.sampling_metadata

    @property
    def outputs(self) -> list[list[int] | None]:
        """Each request's live output tokens, as vLLM's processors hold them."""
        return self.runner.input_batch.req_output_token_ids

    @property
    def logits_processors(self) -> list[Any]:
        """vLLM's logits processors that can change an argmax."""
        return self.runner.input_batch.logitsprocs.non_argmax_invariant

    def drop_stale_thinking_budgets(self) -> None:
        """Drops vLLM's thinking states of slots whose request has no thinking budget. Call when a
        step's batch is complete.

        vLLM keeps the state of a request that ended where a request without one moves into its
        slot, and would force the end of thinking on that request: see
        docs/notes/vllm_thinking_budgets.md.
        """
        batch = self.runner.input_batch
        holder = batch.thinking_budget_state_holder
        if holder is None or not holder.has_tracked_requests():
            return
        for index in list(holder._state):
            params = None
            if index < len(self.req_ids):
                params = self.runner.requests[self.req_ids[index]].sampling_params
            if params is None or params.thinking_token_budget is None:
                del holder._state[index]

    def discarded(self) -> set[int]:
        """Requests, by index, whose sample is thrown away: their prompts go on."""
        mask = self.runner.discard_request_mask.np[: self.runner.input_batch.num_reqs]
        return set(np.nonzero(mask)[0].tolist())

    @contextmanager
    def discarded_generators_hidden(self) -> Iterator[None]:
        """Without the random generators of discarded samples in the batch."""
        generators = self.runner.input_batch.generators
        hidden = {i: generators.pop(i) for i in self.discarded() if i in generators}
        try:
            yield
        finally:
            generators.update(hidden)

    def ends_request(self, index: int, token_id: int) -> bool:
        """Whether vLLM ends the request at `index` of the batch once it emits this token."""
        params = self.runner.requests[self.req_ids[index]].sampling_params
        if params is None:
            return False
        return token_id == params.eos_token_id or token_id in (params.stop_token_ids or ())

    def token_ids(self, index: int) -> np.ndarray:
        """int32 [n], prompt and output of the request at `index` of the batch; a view."""
        batch = self.runner.input_batch
        return batch.token_ids_cpu[index, : int(batch.num_tokens_no_spec[index])]

    def request(self, index: int) -> RequestState:
        """The request at `index` of the batch, with the step's tokens."""
        runner, batch = self.runner, self.runner.input_batch
        state = runner.requests[batch.req_ids[index]]
        params = state.sampling_params
        num_tokens = int(batch.num_tokens_no_spec[index])
        left = runner.max_model_len - num_tokens
        if params is not None and params.max_tokens is not None:
            left = min(left, params.max_tokens - len(state.output_token_ids))
        is_token = batch.is_token_ids[index, :num_tokens]
        return RequestState(
            req_id=state.req_id,
            token_ids=self.token_ids(index),
            is_text=not runner.enable_prompt_embeds or bool(is_token.all()),
            tokens_left=left,
            extra_args=None if params is None else params.extra_args,
        )
