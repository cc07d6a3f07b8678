# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters that depend on what was generated, for rows that are nodes of a tree.

vLLM's penalties, bad words and thinking budgets take the rows above a row for the tokens before it.
In a tree these are its ancestors only by accident; here a row's drafted tokens are those of its
path. Everything else in a sampler looks at a row's own logits or at its position, which follows
depth: temperature, min_p, top-k and top-p, biases, allowed tokens, `min_tokens`.

Tensor code of fixed shapes throughout: nothing is read on the host.

Letters: M logits rows of the step, P the longest path, B bad words, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

# Added to logits by vLLM for a token that must come next.
_FORCED = 1.0e9
_INF = float("inf")


class StepParents(Protocol):
    """A step's logits rows as trees."""

    @property
    def parent_rows(self) -> torch.Tensor:
        """[M] int32 logits row of each row's parent; negative for roots and for what is no node."""

    @property
    def depths(self) -> torch.Tensor:
        """[M] int32 distance to the root."""


@dataclass(frozen=True)
class TreePaths:
    """What was drafted before each row's next token."""

    # [M, P] int64 tokens from the first below the root to the row's own; -1 past its end
    tokens: torch.Tensor
    # [M] int64
    lengths: torch.Tensor


def tree_paths(
    parents: StepParents,
    # [M] token of every row
    input_ids: torch.Tensor,
    # [M] place within the row's request, 0 for its root
    places: torch.Tensor,
    longest: int,
) -> TreePaths:
    """Every row's path; rows without a parent have none.

    Args:
        longest: P, at least the greatest depth.
    """
    num_rows = len(places)
    rows = torch.arange(num_rows, device=places.device)
    is_node = parents.parent_rows >= 0
    above = torch.where(is_node, parents.parent_rows.long(), rows)
    # After k rounds of doubling a row knows its 2 ** k nearest ancestors: their tokens, by depth.
    depth = torch.where(is_node, parents.depths.long() - 1, longest)
    tokens = torch.full((num_rows, longest + 1), -1, dtype=torch.int64, device=places.device)
    tokens.scatter_(1, depth[:, None], input_ids[:, None].long())
    # Rows that are no nodes share the last column.
    tokens = tokens[:, :longest]
    for _ in range(max(1, longest.bit_length())):
        tokens = torch.maximum(tokens, tokens[above])
        above = above[above]
    return TreePaths(tokens, torch.where(is_node, parents.depths.long(), 0))


def output_tail(
    paths: TreePaths,
    # [M, n] int64 position in the sequence
    positions: torch.Tensor,
    # [M] committed tokens of the row's request
    total_lens: torch.Tensor,
    # [slots, max_model_len]
    all_token_ids: torch.Tensor,
    # [M] int64
    slots: torch.Tensor,
) -> torch.Tensor:
    """Tokens [M, n] at positions of each row's sequence, committed and drafted; -1 outside."""
    drafted = positions - total_lens[:, None]
    committed = all_token_ids[slots[:, None], positions.clamp(0, all_token_ids.shape[1] - 1)].long()
    on_path = paths.tokens.gather(1, drafted.clamp(0, paths.tokens.shape[1] - 1))
    on_path = torch.where(drafted < paths.lengths[:, None], on_path, -1)
    return torch.where(positions < 0, -1, torch.where(drafted < 0, committed, on_path))


class _OnTrees:
    """One of vLLM's parameters: its own in steps without drafts, along paths in the others."""

    def __init__(self, stock: Any, params: TreeParams) -> None:
        self.stock = stock
        self.params = params

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor | None:
        parents = self.params.parents()
        if parents is None:
            return self.stock.apply(logits, ctx)
        if not self.is_used(ctx.idx_mapping_np):
            return logits
        paths = tree_paths(parents, ctx.input_ids, ctx.expanded_local_pos, self.params.longest_path)
        return self.apply_along(paths, logits, ctx)

    def is_used(self, slots: np.ndarray) -> bool:
        """Whether a request of the batch has the parameter."""
        raise NotImplementedError

    def apply_along(self, paths: TreePaths, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Logits [M, V] float32, changed in place."""
        raise NotImplementedError


class TreePenalties(_OnTrees):
    """vLLM's kernel penalises committed tokens; those of a row's path are then computed once more,
    from the logits before it, with their number on the path added."""

    def is_used(self, slots: np.ndarray) -> bool:
        return bool(np.any(self.stock.use_penalty[slots]))

    def apply_along(self, paths: TreePaths, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        stock, slots = self.stock, ctx.expanded_idx_mapping.long()[:, None]
        is_drafted = paths.tokens >= 0
        # Where a path has ended: token 0 as often as the path has it, like any other.
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


class TreeBadWords(_OnTrees):
    """The last token of a word whose other tokens end a row's sequence."""

    def __init__(self, stock: Any, params: TreeParams) -> None:
        super().__init__(stock, params)
        # [slots] tokens of the longest word but its last
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
        # [M, B] places of each word among its request's tokens
        offsets = stock.bad_word_offsets.gpu[slots, : num_words + 1].long()
        starts, ends = offsets[:, :-1], offsets[:, 1:]
        words = stock.bad_word_token_ids.gpu
        prompt_lens = states.prompt_len.gpu[slots]
        total_lens = states.total_len.gpu[slots]
        sequence_lens = (total_lens + paths.lengths)[:, None]
        for back in range(1, int(longest) + 1):
            position = sequence_lens - back
            token = output_tail(paths, position, total_lens, states.all_token_ids.gpu, slots)
            # Words do not reach into the prompt.
            token = torch.where(position >= prompt_lens[:, None], token, -1)
            place = ends - 1 - back
            wanted = words[slots[:, None], place.clamp_min(0)]
            matches &= (place < starts) | (wanted == token)
        last = words[slots[:, None], (ends - 1).clamp_min(0)].long()
        # Two words may have one last token: the least of what they leave of it.
        return logits.scatter_reduce_(1, last, torch.where(matches, -_INF, _INF), "amin")


class TreeThinkingBudget(_OnTrees):
    """The end of thinking, forced on rows whose path has used the budget up."""

    def is_used(self, slots: np.ndarray) -> bool:
        return self.stock.enabled and bool(np.any(self.stock.use_thinking_budget[slots]))

    def apply_along(self, paths: TreePaths, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        stock, slots = self.stock, ctx.expanded_idx_mapping.long()
        # vLLM's own, on no row: brings what it remembers of committed tokens up to date.
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
        # The marker that is forced may have begun already.
        begun = torch.zeros_like(slots)
        for length in range(1, len(end_ids)):
            place = (lens - length - first).long()[:, None]
            place = place + torch.arange(length, device=logits.device)
            matches = (tail.gather(1, place.clamp(0, width - 1)) == end_ids[:length]).all(1)
            begun = torch.where(matches & (place[:, 0] >= 0), length, begun)
        token = end_ids[begun].long()[:, None]
        forced = torch.where(is_forced[:, None], _FORCED, logits.gather(1, token))
        return logits.scatter_(1, token, forced)


class _Watched:
    """A processor of somebody's own; notes whose logits it changes."""

    def __init__(self, stock: Any, max_num_reqs: int) -> None:
        self.stock = stock
        self.is_active = np.zeros(max_num_reqs, dtype=bool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def add_request(self, slot: int, sampling_params: Any) -> bool:
        self.is_active[slot] = active = self.stock.add_request(slot, sampling_params)
        return active


class TreeParams:
    """Puts the above into one of vLLM's samplers.

    Args:
        sampler: vLLM's sampler, before its first request.
        parents: the running step's rows as trees; None in a step without drafts.
        longest_path: the greatest depth a node can have.
    """

    def __init__(
        self, sampler: Any, parents: Callable[[], StepParents | None], longest_path: int
    ) -> None:
        from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
        from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

        self.parents = parents
        self.longest_path = longest_path
        self._watched: list[_Watched] = []

        def on_trees(processor: Any) -> Any:
            # By what vLLM builds itself; a subclass is somebody else's.
            if processor is sampler.penalties_state:
                return TreePenalties(processor, self)
            if type(processor) is BadWordsState:
                return TreeBadWords(processor, self)
            if type(processor) is LogitBiasState:
                return processor
            self._watched.append(_Watched(processor, sampler.req_states.max_num_reqs))
            return self._watched[-1]

        sampler.logits_processors[:] = map(on_trees, sampler.logits_processors)
        sampler.thinking_budget_state = TreeThinkingBudget(sampler.thinking_budget_state, self)

    def follows(self, slot: int) -> bool:
        """Whether trees can be drafted for the request in a slot: a processor that we do not know
        may read the rows before a row, which are not its ancestors."""
        return not any(watched.is_active[slot] for watched in self._watched)
