# SPDX-License-Identifier: Apache-2.0
"""Sampling the target row by row with vLLM's own sampler, as plain decoding would.

Between two depths of the walk this does what vLLM does between two steps: the sampled
token joins the request's output and stateful logits processors are updated. So penalties,
bad words, `min_tokens`, seeds and logprobs see exactly what they see in plain decoding.

Seam: target_sampler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_specplug.accept import EndFn, WalkResult, walk_trees
from vllm_specplug.drafting.drafter import device_tensor
from vllm_specplug.kernels import row_argmax
from vllm_specplug.tree import DraftTree

PLACEHOLDER_TOKEN_ID = -1
# Most logits sampled at once: in float32, with the sampler's temporaries, some hundred MiB.
MAX_ELEMENTS_AT_ONCE = 1 << 25


class TargetSampler:
    """One step's walk over logits rows.

    Args:
        sampler: vLLM's sampler.
        logits: [rows, V], the rows of all requests, each root followed by its nodes.
        metadata: vLLM's sampling metadata of the batch.
        outputs: each request's live output token list, as vLLM's processors hold it.
        discarded: requests whose sample is thrown away (prompt chunks); they neither
            advance their random state nor grow their output.
        at_once: sample all rows before the walk where requests keep no state. Worth it where
            each sample would wait for a device.
        ends_request: see `walk_trees`.
    """

    def __init__(
        self,
        sampler: Any,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        outputs: list[list[int] | None],
        discarded: set[int],
        at_once: bool = False,
        ends_request: EndFn = lambda i, token: False,
    ) -> None:
        self.sampler = sampler
        self.logits = logits
        self.metadata = metadata
        self.outputs = outputs
        self.discarded = discarded
        self.at_once = at_once
        self.ends_request = ends_request
        self.logprobs: list[LogprobsTensors] = []
        self.depth = 0

    def walk(
        self, trees: list[DraftTree | None], root_rows: list[int]
    ) -> tuple[WalkResult, SamplerOutput]:
        """Walks all trees; returns the walk and vLLM's sampler output (-1 padded)."""
        tokens: list[int] | None = None
        if self._plain_argmax():
            tokens = row_argmax(self.logits).tolist()
        elif self.at_once and self.logits.numel() <= MAX_ELEMENTS_AT_ONCE and self._is_stateless():
            # Each row's sample is a draw from the target's distribution at that node; those of
            # nodes that are not visited are never looked at.
            tokens = self.sample_rows(root_rows).tolist()
        if tokens is not None:
            result = walk_trees(
                trees,
                root_rows,
                lambda rows, live: [tokens[r] for r in rows],
                self.ends_request,
            )
        else:
            kept = [len(output or ()) for output in self.outputs]
            try:
                result = walk_trees(trees, root_rows, self._sample, self.ends_request)
            finally:
                # vLLM's bookkeeping appends the step's tokens itself.
                for output, length in zip(self.outputs, kept, strict=True):
                    if output is not None:
                        del output[length:]
        width = max(len(tokens) for tokens in result.token_ids)
        padded = [
            tokens + [PLACEHOLDER_TOKEN_ID] * (width - len(tokens)) for tokens in result.token_ids
        ]
        return result, SamplerOutput(
            # On the host, where the walk has them: vLLM would copy them back at once.
            sampled_token_ids=torch.tensor(padded, dtype=torch.int32),
            logprobs_tensors=self._stack_logprobs(),
        )

    def sample_rows(self, root_rows: list[int]) -> torch.Tensor:
        """A sample of every row, int64 [rows], as its request's parameters say. Edits logits."""
        m = self.metadata
        counts = np.diff([*root_rows, len(self.logits)])
        owner = device_tensor(np.repeat(np.arange(len(counts)), counts), self.logits.device)

        def of_rows(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[owner]

        output = self.sampler(
            logits=self.logits,
            sampling_metadata=replace(
                m,
                temperature=of_rows(m.temperature),
                top_p=of_rows(m.top_p),
                top_k=of_rows(m.top_k),
                output_token_ids=[],
                spec_token_ids=[],
            ),
        )
        return output.sampled_token_ids[:, 0].long()

    def _plain_argmax(self) -> bool:
        """Whether the sampler would take nothing but the argmax of every row."""
        m = self.metadata
        return m.all_greedy and self._rows_suffice(m.logitsprocs.non_argmax_invariant)

    def _is_stateless(self) -> bool:
        """Whether a row's sample depends on nothing but its logits, its request's temperature,
        top-k and top-p, and the common random state."""
        m = self.metadata
        return not m.generators and self._rows_suffice(m.logitsprocs.all)

    def _rows_suffice(self, processors: Iterable[Any]) -> bool:
        """Whether samples depend on no output or history of a request, nor on `processors`."""
        m = self.metadata
        holder = m.thinking_budget_state_holder
        return (
            m.no_penalties
            and not m.bad_words_token_ids
            and m.allowed_token_ids_mask is None
            and m.max_num_logprobs is None
            and not m.logprob_token_ids
            and (holder is None or not holder.has_tracked_requests())
            and all(_is_idle(p) for p in processors)
        )

    def _sample(self, rows: list[int], live: list[bool]) -> list[int]:
        alive = {i for i, is_live in enumerate(live) if is_live and i not in self.discarded}
        generators = {i: g for i, g in self.metadata.generators.items() if i in alive}
        if self.depth:
            # As between two steps of plain decoding, where each update follows one new token.
            for processor in self.metadata.logitsprocs.all:
                processor.update_state(None)
        self.depth += 1
        index = device_tensor(rows, self.logits.device)
        with _thinking_budgets_of(self.metadata.thinking_budget_state_holder, live):
            # Advanced indexing copies: the sampler edits logits in place. Draft tokens are not
            # shown to it: the outputs have grown by the path already.
            output = self.sampler(
                logits=self.logits[index],
                sampling_metadata=replace(self.metadata, generators=generators, spec_token_ids=[]),
            )
        if output.logprobs_tensors is not None:
            self.logprobs.append(output.logprobs_tensors)
        tokens = output.sampled_token_ids[:, 0].tolist()
        for i in alive:
            history = self.outputs[i]
            if history is not None:
                history.append(tokens[i])
        return tokens

    def _stack_logprobs(self) -> LogprobsTensors | None:
        """One entry per (request, depth), request major, as vLLM's parser expects them."""
        if not self.logprobs:
            return None
        num_reqs = self.logprobs[0].logprobs.shape[0]

        def stacked(name: str) -> torch.Tensor:
            parts = [getattr(step, name) for step in self.logprobs]
            if parts[0].numel() == 0:  # full-vocabulary logprobs carry no ids or ranks
                return torch.empty((num_reqs * len(parts), 0), dtype=parts[0].dtype)
            return torch.stack(parts, dim=1).flatten(0, 1)

        return LogprobsTensors(
            stacked("logprob_token_ids"), stacked("logprobs"), stacked("selected_token_ranks")
        )


def _is_idle(processor: Any) -> bool:
    """Whether a logits processor would leave every row as it is."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    if isinstance(processor, MinPLogitsProcessor):
        return not processor.min_p_count
    return bool(getattr(processor, "specplug_idle", False))


@contextmanager
def _thinking_budgets_of(holder: Any, live: list[bool]) -> Iterator[None]:
    """Lets only requests that still walk count down their thinking budgets.

    The holder counts calls as well as tokens, so a request that has left the walk must not be
    shown again. In its speculative mode it would expect the rows of all drafts at once; here
    each call is one row per request, which is its plain mode.
    """
    if holder is None or not holder.has_tracked_requests():
        yield
        return
    states = holder._state
    holder._state = {i: state for i, state in states.items() if live[i]}
    holder.in_spec_mode = False
    try:
        yield
    finally:
        holder._state = states
