# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters that depend on generated tokens, for rows that are nodes of a tree.

vLLM's penalties, bad words and thinking budgets take the rows above a row for the tokens before it.
In a tree, those rows need not be its ancestors; the classes below use the tokens of its path.
Everything else in a sampler (temperature, min_p, top-k, top-p, biases, allowed tokens,
`min_tokens`) reads only a row's own logits or its position, which follows depth. Custom processors
see one row of each request at a time, as in plain decoding.

All of it is tensor code of fixed shapes: the host reads nothing.

Letters: M logits rows of the step, P the longest path, B bad words, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

from vllm_specplug.vllm_v2.penalty_processor import ContextualPenalty
from vllm_specplug.vllm_v2.step_context import StepContext
from vllm_specplug.vllm_v2.tree_paths import TreePaths, output_tail, tree_paths

# vLLM adds this to the logit of a token that must come next.
_FORCED = 1.0e9
_INF = float("inf")


class TreeAwareParam:
    """A sampling parameter: its own code in steps without drafts, `apply_along` in others.

    A subclass or the wrapped parameter provides:

    - `is_used(slots)` returns whether any request of the batch has the parameter.
    - `apply_along(paths, logits, ctx)` applies it to logits [M, V] float32 in place, along each
      row's path, and returns them.
    """

    def __init__(self, stock: Any, step: StepContext, longest_path: int) -> None:
        self.stock = stock
        self.step = step
        self.longest_path = longest_path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor | None:
        parents = self.step.trees
        if parents is None:
            return self.stock.apply(logits, ctx)
        if not self.is_used(ctx.idx_mapping_np):
            return logits
        paths = tree_paths(parents, ctx.input_ids, ctx.expanded_local_pos, self.longest_path)
        return self.apply_along(paths, logits, ctx)


class TreePenalties(TreeAwareParam):
    """Penalties. vLLM's kernel penalises committed tokens. The tokens of a row's path are then
    computed again from the original logits, with their count on the path added."""

    def is_used(self, slots: np.ndarray) -> bool:
        return bool(np.any(self.stock.use_penalty[slots]))

    def apply_along(self, paths: TreePaths, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        stock, slots = self.stock, ctx.expanded_idx_mapping.long()[:, None]
        is_drafted = paths.tokens >= 0
        # Past its end a path stands for token 0, which keeps its own count.
        tokens = paths.tokens.clamp_min(0)
        before = logits.gather(1, tokens)
        first = torch.zeros_like(ctx.expanded_local_pos)
        logits = stock.apply(logits, replace(ctx, expanded_local_pos=first))

        repeats = (tokens[:, :, None] == tokens[:, None, :]) & is_drafted[:, None, :]
        counts = stock.output_bin_counts[slots, tokens] + repeats.sum(2)
        seen = counts > 0
        in_prompt = (stock.prompt_bin_mask[slots, tokens // 32] >> (tokens % 32)) & 1
        repetition = stock.repetition_penalty.gpu[slots]
        scale = torch.where(seen | (in_prompt == 1), repetition, 1.0)
        after = before * torch.where(before > 0, 1.0 / scale, scale)
        after = after - stock.frequency_penalty.gpu[slots] * counts
        after = after - stock.presence_penalty.gpu[slots] * seen
        return logits.scatter_(1, tokens, after)


class TreeBadWords(TreeAwareParam):
    """Bad words: forbids the last token of a word whose other tokens end a row's sequence."""

    def __init__(self, stock: Any, step: StepContext, longest_path: int) -> None:
        super().__init__(stock, step, longest_path)
        # [slots] tokens of the longest word, without its last one
        self.longest = np.zeros(stock.req_states.max_num_reqs, dtype=np.int64)

    def add_request(self, slot: int, sampling_params: Any) -> bool:
        words = sampling_params.bad_words_token_ids or ()
        self.longest[slot] = max((len(word) - 1 for word in words), default=0)
        return self.stock.add_request(slot, sampling_params)

    def is_used(self, slots: np.ndarray) -> bool:
        return bool(np.any(self.stock.num_bad_words.np[slots]))

    def apply_along(self, paths: TreePaths, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        stock, slots = self.stock, ctx.expanded_idx_mapping.long()
        states = stock.req_states
        batch = ctx.idx_mapping_np
        num_words, longest = int(stock.num_bad_words.np[batch].max()), self.longest[batch].max()
        index = torch.arange(num_words, device=logits.device)
        matches = index < stock.num_bad_words.gpu[slots][:, None]
        # [M, B] offsets of each word among its request's tokens
        offsets = stock.bad_word_offsets.gpu[slots, : num_words + 1].long()
        starts, ends = offsets[:, :-1], offsets[:, 1:]
        words = stock.bad_word_token_ids.gpu
        prompt_lens = states.prompt_len.gpu[slots]
        total_lens = states.total_len.gpu[slots]
        sequence_lens = (total_lens + paths.lengths)[:, None]
        for back in range(1, int(longest) + 1):
            position = sequence_lens - back
            token = output_tail(paths, position, total_lens, states.all_token_ids.gpu, slots)
            # A word does not match tokens of the prompt.
            token = torch.where(position >= prompt_lens[:, None], token, -1)
            index = ends - 1 - back
            wanted = words[slots[:, None], index.clamp_min(0)]
            matches &= (index < starts) | (wanted == token)
        last = words[slots[:, None], (ends - 1).clamp_min(0)].long()
        # "amin": words may share their last token, and one match forbids it.
        return logits.scatter_reduce_(1, last, torch.where(matches, -_INF, _INF), "amin")


class TreeThinkingBudget(TreeAwareParam):
    """Thinking budget: forces the end of thinking on rows whose path has used the budget up."""

    def is_used(self, slots: np.ndarray) -> bool:
        return self.stock.enabled and bool(np.any(self.stock.use_thinking_budget[slots]))

    def apply_along(self, paths: TreePaths, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        stock, slots = self.stock, ctx.expanded_idx_mapping.long()
        # vLLM's own code, on no rows: updates its cache of markers in committed tokens.
        stock.apply(logits[:0], replace(ctx, expanded_idx_mapping=ctx.expanded_idx_mapping[:0]))
        start_ids = stock.reasoning_start_token_ids
        natural_end_ids = stock.natural_reasoning_end_token_ids
        end_ids = stock.reasoning_end_token_ids
        margin = max(len(start_ids), len(natural_end_ids), len(end_ids)) - 1
        total_lens = stock.req_states.total_len.gpu[slots]
        first = total_lens - margin
        width = margin + paths.tokens.shape[1]
        positions = first.long()[:, None] + torch.arange(width, device=logits.device)
        all_token_ids = stock.req_states.all_token_ids.gpu
        # [M, width] the end of each row's sequence
        tail = output_tail(paths, positions, total_lens, all_token_ids, slots)

        def last_match(marker: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
            windows = tail.unfold(1, len(marker), 1)
            found = (windows == marker).all(2)
            begins = torch.where(found, positions[:, : found.shape[1]], -1)
            return torch.maximum(begins.amax(1), known[slots])

        started = last_match(start_ids, stock.cached_last_start)
        ended = last_match(natural_end_ids, stock.cached_last_end)
        lens = total_lens + paths.lengths
        budget = stock.thinking_token_budget.gpu[slots]
        is_forced = (budget >= 0) & (started >= 0) & (started > ended)
        is_forced &= lens - started - len(start_ids) >= budget
        # The forced marker may have begun already.
        begun = torch.zeros_like(slots)
        for length in range(1, len(end_ids)):
            index = (lens - length - first).long()[:, None]
            index = index + torch.arange(length, device=logits.device)
            matches = (tail.gather(1, index.clamp(0, width - 1)) == end_ids[:length]).all(1)
            begun = torch.where(matches & (index[:, 0] >= 0), length, begun)
        token = end_ids[begun].long()[:, None]
        forced = torch.where(is_forced[:, None], _FORCED, logits.gather(1, token))
        return logits.scatter_(1, token, forced)


class TreeProcessor(TreeAwareParam):
    """A custom processor, which sees what plain decoding would show it.

    It may read a row's past from the rows above it or from the request's committed tokens. It
    therefore gets one row of each request at a time, like a step without drafts: the row's path
    follows the committed tokens, and there is no other row.
    """

    def __init__(self, stock: Any, step: StepContext, longest_path: int, req_states: Any) -> None:
        super().__init__(stock, step, longest_path)
        self.req_states = req_states
        # [slots] whether it changes the request's logits
        self.is_active = np.zeros(req_states.max_num_reqs, dtype=bool)

    def add_request(self, slot: int, sampling_params: Any) -> bool:
        self.is_active[slot] = active = self.stock.add_request(slot, sampling_params)
        return active

    def is_used(self, slots: np.ndarray) -> bool:
        return bool(np.any(self.is_active[slots]))

    def apply_along(self, paths: TreePaths, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        parents = self.step.trees
        assert parents is not None
        total_lens, all_token_ids = (
            self.req_states.total_len.gpu,
            self.req_states.all_token_ids.gpu,
        )
        slots = ctx.idx_mapping.long()
        committed = total_lens[slots]
        # [R] first row of each request; all others count from there
        index = torch.arange(len(logits), device=logits.device)
        is_root = ctx.expanded_local_pos == 0
        request = is_root.long().cumsum(0) - 1
        roots = torch.zeros_like(slots).scatter_reduce_(
            0, request, torch.where(is_root, index, 0), "amax"
        )
        lasts = torch.zeros_like(slots).scatter_reduce_(0, request, index, "amax")
        columns = torch.arange(paths.tokens.shape[1], device=logits.device)
        try:
            for offset in range(parents.rows.max_request_rows):
                # A request with fewer rows shows its last one again; the result is unused.
                rows = torch.minimum(roots + offset, lasts)
                lengths = paths.lengths[rows]
                is_path = columns < lengths[:, None]
                # Columns past the path write the first token onto itself.
                at = torch.where(is_path, committed[:, None].long() + columns, 0)
                token = torch.where(
                    is_path, paths.tokens[rows], all_token_ids[slots, 0][:, None].long()
                )
                all_token_ids[slots[:, None], at] = token.to(all_token_ids.dtype)
                total_lens[slots] = (committed + lengths).to(total_lens.dtype)
                shown = replace(
                    ctx,
                    expanded_idx_mapping=ctx.idx_mapping,
                    expanded_local_pos=torch.zeros_like(ctx.expanded_local_pos[rows]),
                    input_ids=ctx.input_ids[rows],
                    pos=ctx.pos[rows],
                    seq_lens_upper_bound_np=self._seq_lens(ctx, rows),
                )
                before = logits[rows]
                after = self.stock.apply(before.clone(), shown)
                is_new = (roots + offset <= lasts)[:, None]
                logits[rows] = torch.where(is_new, after, before)
        finally:
            total_lens[slots] = committed
        return logits

    @staticmethod
    def _seq_lens(ctx: Any, rows: torch.Tensor) -> np.ndarray:
        """Returns the tokens visible to each row: exact, as in plain decoding, on a CPU; elsewhere
        vLLM's upper bound, because reading would wait."""
        if ctx.pos.device.type != "cpu":
            return ctx.seq_lens_upper_bound_np
        return (ctx.pos[rows] + 1).numpy().astype(ctx.seq_lens_upper_bound_np.dtype)


def put_on_trees(sampler: Any, step: StepContext, longest_path: int) -> None:
    """Wraps the processors of one of vLLM's samplers. Call it before the first request.

    Args:
        step: the running step, which has no trees if it has no drafts.
        longest_path: the maximum depth of a node.
    """

    def on_trees(processor: Any) -> Any:
        # By exact type: a custom processor may be a subclass of vLLM's class.
        if processor is sampler.penalties_state:
            return TreePenalties(processor, step, longest_path)
        if type(processor) is BadWordsState:
            return TreeBadWords(processor, step, longest_path)
        if type(processor) is LogitBiasState:
            return processor
        if type(processor) is ContextualPenalty:
            return TreeAwareParam(processor, step, longest_path)
        return TreeProcessor(processor, step, longest_path, sampler.req_states)

    sampler.logits_processors[:] = map(on_trees, sampler.logits_processors)
    sampler.thinking_budget_state = TreeThinkingBudget(
        sampler.thinking_budget_state, step, longest_path
    )
