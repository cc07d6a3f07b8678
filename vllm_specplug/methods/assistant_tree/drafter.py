# SPDX-License-Identifier: Apache-2.0
"""Assistant trees: one forward of the assistant per level drafts all frontiers.

The assistant has no cache. Its layers attend caches of the target, without the drafted tokens, so
a level needs nothing of the levels before it except the states of the parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from vllm_specplug.drafting.caches import DeviceTargetCache, TargetCache, TargetCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_levels import DeviceExpand, DeviceFrontier
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.drafting.host_levels import context_attention
from vllm_specplug.drafting.level_drafter import LevelDrafter
from vllm_specplug.drafting.ngram import ngram_branches
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.methods.assistant_tree.checkpoint import load_assistant
from vllm_specplug.methods.assistant_tree.head import FusedAssistant, GroupedVocabulary
from vllm_specplug.tree.beam import Expand, Frontier


class AssistantDrafter(LevelDrafter):
    """Drafter of method `assistant_tree`."""

    vocabulary: GroupedVocabulary | None = None

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        assert self.options.head_path is not None
        head = load_assistant(self.options.head_path, target.text_config)
        head = head.to(device=target.device, dtype=target.dtype)
        self.config = head.config
        self.embed_tokens = target.embed_tokens.to(device=target.device, dtype=target.dtype)
        self.target_ids = None
        self.draft_vocab_size = head.config.scored_tokens
        if head.config.centroids is None:
            self.lm_head = target.make_lm_head(None, head.embed_tokens.weight)
        else:
            self.vocabulary = GroupedVocabulary(head, target.make_linear)
        self.head = FusedAssistant(head, target.make_linear)
        self.ngrams = ngram_branches(self.options)
        # [B, H] states of each request's last committed position, in batch order
        self._roots = self.embed_tokens.new_zeros(0, head.config.target_hidden_size)

    def target_cache_specs(self) -> list[TargetCacheSpec]:
        return [layer.cache for layer in self.config.layers]

    def bind_target_caches(self, caches: Sequence[TargetCache | DeviceTargetCache]) -> None:
        super().bind_target_caches(caches)
        self.drafts_on_device = hasattr(caches[0], "level_attention")

    def observe(self, committed: CommittedTokens) -> None:
        if committed.last_rows is not None:
            assert committed.output_states is not None
            states = committed.output_states
            self._roots = states[committed.last_rows.to(states.device)]

    @property
    def drafts_from_graphs(self) -> bool:
        return True

    @property
    def request_states(self) -> torch.Tensor:
        return self._roots

    def prepare_context(self, requests: DraftRequests | DeviceRequests) -> None:
        """Does nothing: the context is the target's."""

    @property
    def score_size(self) -> int:
        return super().score_size if self.vocabulary is None else self.vocabulary.row_size

    def score(self, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.vocabulary is None:
            return super().score(hidden, width)
        return self.vocabulary.candidates(hidden, width)

    def device_expand(
        self, requests: DraftRequests | DeviceRequests, context_lens: torch.Tensor, width: int
    ) -> DeviceExpand:
        contexts = context_lens.clamp_min(0)
        caches = cast(Sequence[DeviceTargetCache], self.target_caches)
        made = {cache: cache.level_attention(requests, contexts) for cache in dict.fromkeys(caches)}
        attend = [made[cache] for cache in caches]
        rotations = self.head.rotations((contexts - 1).clamp_min(0))
        every = torch.arange(len(contexts), device=contexts.device)
        states, previous = self.root_states(requests), 1

        def expand(frontier: DeviceFrontier) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal states, previous
            if frontier.depth:
                states = states[frontier.rows_in(previous)]
            previous = frontier.token_ids.shape[1]
            hidden, states = self.head(
                self.embed(frontier.token_ids.flatten()),
                states,
                rotations,
                every.repeat_interleave(previous),
                attend,
            )
            return self.level_candidates(hidden, frontier.token_ids.shape, width)

        return expand

    def host_expand(self, requests: DraftRequests) -> Expand:
        caches = cast(Sequence[TargetCache], self.target_caches)
        starts = np.maximum(np.array(requests.context_lens) - 1, 0)
        rotations = self.head.rotations(torch.from_numpy(starts))
        width = max(requests.widths)
        states = self.root_states(requests)

        def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            nonlocal states
            made = {
                cache: context_attention(cache, requests, frontier)
                for cache in dict.fromkeys(caches)
            }
            parents = frontier.parent_rows if frontier.depth else frontier.requests
            hidden, states = self.head(
                self.embed(torch.from_numpy(frontier.token_ids)),
                states[torch.from_numpy(parents)],
                rotations,
                torch.from_numpy(frontier.requests),
                [made[cache] for cache in caches],
            )
            ids, log_probs = self.candidates(hidden, width)
            return ids.numpy(), log_probs.numpy()

        return expand
