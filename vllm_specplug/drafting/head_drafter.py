# SPDX-License-Identifier: Apache-2.0
"""The base class of drafters with a head over the target's tables, beside n-gram branches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable

import torch

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import Drafter, TargetWeights
from vllm_specplug.drafting.ngram import NgramBranches, ngram_branches
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import top_candidates
from vllm_specplug.tree import DraftTree

# Maximum number of draft logits computed at once: 128 MiB in float32.
MAX_LOGITS = 1 << 25


class HeadDrafter(Drafter):
    """A drafter whose head embeds tokens and scores states over a draft vocabulary. N-gram branches
    are added to its trees.

    Subclasses call `take_tables` in `load`, and then set `lm_head` or override `score`.
    """

    ngrams: NgramBranches | None
    # [V, H]
    embed_tokens: torch.Tensor
    # [V'] target id of each draft id; None if the head drafts the whole vocabulary
    target_ids: torch.Tensor | None
    # V'
    draft_vocab_size: int
    # [T, H] -> [T, V']
    lm_head: Callable[[torch.Tensor], torch.Tensor]

    def take_tables(
        self,
        target: TargetWeights,
        target_ids: torch.Tensor | None = None,
        embed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Sets the embedding, which is the target's if the head has none, the vocabulary, and the
        n-gram branches.

        Args:
            target_ids: int64 [V'] of a reduced vocabulary; None for the whole vocabulary.
            embed_tokens: [V, H] of the head.
        """
        embed = target.embed_tokens if embed_tokens is None else embed_tokens
        self.embed_tokens = embed.to(device=target.device, dtype=target.dtype)
        self.target_ids = None if target_ids is None else target_ids.to(target.device)
        self.draft_vocab_size = len(self.embed_tokens if target_ids is None else target_ids)
        self.ngrams = ngram_branches(self.options)

    @abstractmethod
    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        """Returns the trees of the head only, for at least one request, of `depths_of`."""

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(requests)
        chosen, drafted = requests.for_forward()
        if chosen:
            for r, tree in zip(chosen, self.draft(drafted), strict=True):
                trees[r] = tree
        return trees if self.ngrams is None else self.ngrams.add_to(trees, requests)

    @property
    def forward_depth(self) -> int:
        return self.options.tree_depth

    def depths_of(self, requests: DraftRequests) -> list[int]:
        """Returns the depth of each request's draft forward [R]."""
        return [min(depth, self.forward_depth) for depth in requests.depths]

    def max_depth_of(self, requests: DeviceRequests) -> int:
        """Returns the maximum depth of a draft forward on the device."""
        depth = self.forward_depth
        return depth if requests.max_depth is None else min(depth, requests.max_depth)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, H] of token ids [T], which may exceed the vocabulary."""
        # A prompt may hold token ids past the target's vocabulary. vLLM's padded table has rows for
        # them, this one does not; for a draft any row will do.
        return self.embed_tokens[token_ids.clamp(0, len(self.embed_tokens) - 1)]

    def likeliest(self, states: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `width` likeliest tokens after states [T, H], best first: target token ids
        int64 [T, width] and log-probabilities float32 [T, width]."""
        draft_ids, log_probs = self.likeliest_draft_ids(states, width)
        return self.to_target_ids(draft_ids), log_probs

    def likeliest_draft_ids(
        self, states: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `likeliest` with ids of the draft vocabulary."""
        width = min(width, self.draft_vocab_size)
        # In pieces: the logits of all requests would be the largest tensor of a step.
        pieces = torch.split(states, max(1, self.max_scores(width) // self.score_size))
        found = [self.score(piece, width) for piece in pieces]
        if len(found) == 1:
            return found[0]
        draft_ids, log_probs = (torch.cat(parts) for parts in zip(*found, strict=True))
        return draft_ids, log_probs

    def max_scores(self, width: int) -> int:
        """Returns how many scores may be computed at once for the `width` likeliest."""
        return MAX_LOGITS

    @property
    def score_size(self) -> int:
        """Numbers that `score` computes or gathers for one state."""
        return self.draft_vocab_size

    def score(self, states: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `likeliest_draft_ids` of a few states."""
        return top_candidates(self.lm_head(states), width)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Returns the target token ids of draft token ids, of any shape."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def forget(self, req_ids: Iterable[str]) -> None:
        if self.ngrams is not None:
            self.ngrams.forget(req_ids)

    @property
    def has_lookup(self) -> bool:
        return self.ngrams is not None

    def lookup(self, requests: DraftRequests) -> list[DraftTree]:
        if self.ngrams is None:
            return super().lookup(requests)
        return self.ngrams.lookup(requests)

    @property
    def device_branches(self) -> NgramBranches | None:
        # A chain includes no branches.
        return self.ngrams if self.options.tree_width > 1 else None
