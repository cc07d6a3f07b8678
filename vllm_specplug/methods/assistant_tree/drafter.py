# SPDX-License-Identifier: Apache-2.0
"""Assistant trees: one forward of the assistant per level drafts all frontiers.

The assistant has no cache. Its layers attend caches of the target, without the drafted tokens, so
a level needs nothing of the levels before it except the states of the parents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.drafting.caches import TargetCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.drafting.level_drafter import LevelDrafter
from vllm_specplug.drafting.level_rows import LevelRows
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.drafting.root_states import RootStates
from vllm_specplug.methods.assistant_tree.checkpoint import load_assistant
from vllm_specplug.methods.assistant_tree.head import FusedAssistant, GroupedVocabulary


class AssistantDrafter(RootStates, LevelDrafter):
    """Drafter of method `assistant_tree`."""

    vocabulary: GroupedVocabulary | None = None

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        assert self.options.head_path is not None
        head = load_assistant(self.options.head_path, target.text_config)
        head = head.to(device=target.device, dtype=target.dtype)
        self.config = head.config
        self.take_tables(target)
        if head.config.centroids is None:
            self.lm_head = target.make_lm_head(None, head.embed_tokens.weight)
        else:
            self.vocabulary = GroupedVocabulary(head, target.make_linear)
            self.draft_vocab_size = head.config.scored_tokens
        self.head = FusedAssistant(head, target.make_linear)
        self._roots = self.embed_tokens.new_zeros(0, head.config.target_hidden_size)

    def target_cache_specs(self) -> list[TargetCacheSpec]:
        return [layer.cache for layer in self.config.layers]

    def observe(self, committed: CommittedTokens) -> None:
        if committed.last_rows is not None:
            assert committed.output_states is not None
            states = committed.output_states
            self._roots = states[committed.last_rows.to(states.device)]

    def prepare_context(self, requests: DraftRequests | DeviceRequests) -> None:
        """Does nothing: the context is the target's."""

    @property
    def score_size(self) -> int:
        return super().score_size if self.vocabulary is None else self.vocabulary.row_size

    def score(self, states: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.vocabulary is None:
            return super().score(states, width)
        return self.vocabulary.likeliest(states, width)

    def level_forward(self, rows: LevelRows) -> Callable[[], torch.Tensor]:
        rotations = self.head.rotations((rows.context_lens - 1).clamp_min(0))
        states = self.root_states(rows.requests)

        def forward() -> torch.Tensor:
            nonlocal states
            hidden, states = self.head(
                self.embed(rows.token_ids),
                rows.of_parents(states),
                rotations,
                rows.owners,
                [rows.context_attention(cache) for cache in self.target_caches],
            )
            return hidden

        return forward
