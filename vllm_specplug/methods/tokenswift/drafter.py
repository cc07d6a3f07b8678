# SPDX-License-Identifier: Apache-2.0
"""Drafts with TokenSwift, for very long outputs.

There are two sources of drafts:

self    the target runs the anchor over a partial cache; its base prediction and the chained heads
        on its last layer give depths 1, 2, ...
heads   the heads run on the last verified position without a draft forward. The anchor is the base
        prediction there, so head i gives depth i. This source also serves steps in which the
        partial caches have no room for all requests.

N-gram branches join the trees. Which source is faster depends on the context: a draft forward costs
a pass over the weights, and verification costs more with a longer context.
One sample of the target verifies every node. The published rule draws one sample per path instead
and is biased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import torch

from vllm_specplug.drafting.caches import PartialCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.depth_drafter import best_first_on_device, best_first_trees
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.drafter import Drafter, TargetWeights
from vllm_specplug.drafting.head_drafter import MAX_LOGITS
from vllm_specplug.drafting.ngram import NgramBranches, ngram_branches
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.kernels import top_candidates
from vllm_specplug.methods.tokenswift.head import load_heads
from vllm_specplug.tree import DraftTree

SELF, HEADS = "self", "heads"


class TokenSwiftDrafter(Drafter):
    """Drafter of method `tokenswift`."""

    reads_history: ClassVar[bool] = True
    drafts_on_device = True

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        options = self.options
        assert options.head_path is not None
        self.spec: PartialCacheSpec | None = options.settings
        # Only the self-draft: heads read the step's own rows and need few launches.
        self.drafts_from_graphs = self.spec is not None
        heads, target_ids = load_heads(options.head_path, target.text_config)
        self.heads = heads.to(device=target.device, dtype=target.dtype)
        # int64 [V'] target id of each draft id, and [V] draft id of each target id or -1
        self.target_ids = target_ids
        self.draft_ids: torch.Tensor | None = None
        if target_ids is not None:
            draft_ids = torch.full((heads.config.vocab_size,), -1)
            draft_ids[target_ids] = torch.arange(len(target_ids))
            self.target_ids = target_ids.to(target.device)
            self.draft_ids = draft_ids.to(target.device)
        self.lm_head = target.make_lm_head(self.target_ids)
        self.ngrams = ngram_branches(options)
        self.steps_from: Counter[str] = Counter()
        # [T, H] last layer's outputs of the step, and [B] each request's last committed row
        self._hidden: torch.Tensor | None = None
        self._last_rows: torch.Tensor | None = None

    def partial_cache_spec(self) -> PartialCacheSpec | None:
        return self.spec

    def observe(self, committed: CommittedTokens) -> None:
        (self._hidden,) = committed.aux_hidden_states
        self._last_rows = committed.last_rows

    def forget(self, req_ids: Iterable[str]) -> None:
        req_ids = list(req_ids)
        if self.ngrams is not None:
            self.ngrams.forget(req_ids)
        if self.target_forward is not None:
            self.target_forward.forget(req_ids)

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        source = self._source(requests)
        self.steps_from[source] += 1
        deepest = min(self.options.tree_depth, max(requests.depths))
        states = self._states(source, requests)[:deepest]
        depths = [min(len(states), depth) for depth in requests.depths]
        candidates = self._likeliest(states, requests)
        trees = best_first_trees(*candidates, requests.budgets, depths, requests.width)
        return trees if self.ngrams is None else self.ngrams.add_to(trees, requests)

    @property
    def device_branches(self) -> NgramBranches | None:
        # A chain has no branches.
        return self.ngrams if self.options.tree_width > 1 else None

    @property
    def warmup_depth(self) -> int:
        return self.options.tree_depth

    def warmup(self, requests: DraftRequests | DeviceRequests) -> None:
        assert isinstance(requests, DeviceRequests)
        # While vLLM measures memory there are no caches; vLLM's forward needs more memory.
        if self.spec is None or self.target_forward is not None:
            self._device_trees(HEADS if self.spec is None else SELF, requests)

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees:
        source = SELF
        # Without a history a graph is captured: `enter_graph` counts its replays.
        if requests.history is not None:
            source = self._source(requests)
            self.steps_from[source] += 1
        return self._device_trees(source, requests)

    def _device_trees(self, source: str, requests: DeviceRequests) -> DeviceTrees:
        """Returns the trees of `propose` without branches."""
        depth = self.options.tree_depth
        if requests.max_depth is not None:
            depth = min(depth, requests.max_depth)
        states = self._states(source, requests)[:depth]
        return best_first_on_device(*self._likeliest(states, requests), requests)

    @property
    def can_be_captured(self) -> bool:
        return self.target_forward is not None and self.target_forward.captures

    def enter_graph(self, requests: DeviceRequests) -> bool:
        history = requests.history
        if history is None:
            # No step came before this draft.
            return False
        # The size of penalties changes in every step, with the widest window.
        if self._source(requests) != SELF or history.penalties is not None:
            return False
        assert self.target_forward is not None
        if not self.target_forward.prepare(requests):
            return False
        self.steps_from[SELF] += 1
        return True

    def _source(self, requests: DraftRequests | DeviceRequests) -> str:
        """Returns the source of a draft: the option's, or the heads if the target cannot run."""
        forward = self.target_forward
        if self.spec is not None and forward is not None and forward.can_run(requests):
            return SELF
        return HEADS

    @torch.inference_mode()
    def _states(self, source: str, requests: DraftRequests | DeviceRequests) -> torch.Tensor:
        """Returns inputs of the LM head for each depth [D, R, H]; source "self" runs the target."""
        if source == SELF:
            assert self.target_forward is not None
            normed, hidden = self.target_forward(requests)
            return torch.cat((normed[None], self.heads(hidden)))
        rows = self._last_rows
        if self._hidden is None or rows is None:
            # No step came before this draft.
            hidden = next(self.heads.parameters()).new_zeros(
                len(requests), self.heads.config.hidden_size
            )
            return self.heads(hidden)
        if isinstance(requests, DraftRequests):
            rows = rows[device_tensor(requests.req_indices, rows.device)]
        return self.heads(self._hidden[rows])

    @torch.inference_mode()
    def _likeliest(
        self,
        # [D, R, H]
        states: torch.Tensor,
        requests: DraftRequests | DeviceRequests,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Target ids int64 and log-probabilities float32 [R, D, K] of the likeliest tokens of each
        depth, after the request's penalty."""
        vocab_size = self.heads.config.draft_vocab_size
        # In pieces: the logits of all requests would be the largest tensor of a step.
        piece_size = max(1, MAX_LOGITS // (vocab_size * len(states)))
        pieces = []
        for first in range(0, len(requests), piece_size):
            part = states[:, first : first + piece_size]
            logits = self.lm_head(part.flatten(0, 1)).float().unflatten(0, part.shape[:2])
            logits = logits.transpose(0, 1)
            self._penalise(logits, first, requests)
            pieces.append(top_candidates(logits, min(requests.width, vocab_size)))
        ids, log_probs = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return (ids if self.target_ids is None else self.target_ids[ids]), log_probs

    def _penalise(
        self,
        # [n, D, V'], changed in place
        logits: torch.Tensor,
        first: int,
        requests: DraftRequests | DeviceRequests,
    ) -> None:
        """Applies the sampler's penalties to the logits of the requests from `first` on."""
        owner = requests.history if isinstance(requests, DeviceRequests) else requests
        if owner is not None and owner.penalties is not None:
            owner.penalties.apply(logits, first, self.draft_ids)
