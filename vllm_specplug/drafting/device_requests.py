# SPDX-License-Identifier: Apache-2.0
"""Requests to draft for, and their trees, on the device: the host waits for neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DevicePenalties:
    """`DraftPenalty` of R requests whose tokens are on the device."""

    # [R, W] int64 last tokens of each, -1 where none is penalised
    token_ids: torch.Tensor
    # [R] float32
    thetas: torch.Tensor

    def some(self, rows: torch.Tensor) -> DevicePenalties:
        """Those at `rows` [n]."""
        return DevicePenalties(self.token_ids[rows], self.thetas[rows])

    def apply(self, logits: torch.Tensor, first: int, draft_ids: torch.Tensor | None) -> None:
        """Penalises logits [n, D, V'] of the requests from `first` on, in place.

        Args:
            draft_ids: int64 [V] draft id of each target token, -1 for none; None where they are
                the same.
        """
        import torch

        rows = slice(first, first + len(logits))
        tokens, thetas = self.token_ids[rows], self.thetas[rows]
        if draft_ids is not None:
            kept = (tokens >= 0) & (tokens < len(draft_ids))
            tokens = torch.where(kept, draft_ids[torch.where(kept, tokens, 0)], -1)
        is_recent = (tokens >= 0) & (tokens < logits.shape[-1])
        # Whatever is not recent writes token 0, with what token 0 gets.
        tokens = torch.where(is_recent, tokens, 0)
        is_recent = is_recent | (is_recent & (tokens == 0)).any(1, keepdim=True)
        theta = torch.where(is_recent, thetas[:, None], 1.0)[:, None]
        tokens = tokens[:, None].expand(-1, logits.shape[1], -1)
        before = logits.gather(2, tokens)
        logits.scatter_(2, tokens, torch.where(before > 0, before / theta, before * theta))


@dataclass(frozen=True)
class TokenHistory:
    """The tokens of R requests where they lie on the device, and what the host knows of them."""

    # [S, most tokens] int32; a line may hold anything past its request's tokens
    token_ids: torch.Tensor
    # [R] int64 line of each
    lines: torch.Tensor
    # [R]
    req_ids: list[str]
    # [R] Between two drafts for a request it grows by at least as much as the request does
    grown: list[int]
    # [R] whether a request may get a draft
    is_drafted: list[bool]
    # [R] bounds of `DeviceRequests.context_lens`, the lower one a step or two late
    least: list[int]
    most: list[int]
    # What the target's sampler will do to the logits of some tokens; None where to none
    penalties: DevicePenalties | None = None

    def some(self, rows: torch.Tensor, chosen: Sequence[int]) -> TokenHistory:
        """Those at `rows` [n] of the batch, which the host knows as `chosen`."""
        return replace(
            self,
            lines=self.lines[rows],
            req_ids=[self.req_ids[r] for r in chosen],
            grown=[self.grown[r] for r in chosen],
            is_drafted=[self.is_drafted[r] for r in chosen],
            least=[self.least[r] for r in chosen],
            most=[self.most[r] for r in chosen],
            penalties=None if self.penalties is None else self.penalties.some(rows),
        )


@dataclass(frozen=True)
class DeviceRequests:
    """The R requests of a batch to draft for, where their tokens are on the device and the host
    does not wait for them."""

    # [R] int64, see `DraftRequests.anchors`; anything where the budget is 0
    anchors: torch.Tensor
    # [R] int32
    context_lens: torch.Tensor
    # [R] int32, 0 for requests that get no draft
    budgets: torch.Tensor
    # [R] int32
    depths: torch.Tensor
    width: int
    """Most children of a node, of all requests."""
    num_nodes: int
    """N, at least the largest budget."""
    max_context: int
    """Upper bound of the contexts."""
    # [R] int32 row of each in the batch and in the block table; None: one after the other
    rows: torch.Tensor | None = None
    deepest: int | None = None
    """Bound of the depths that is known on the host; None for none."""
    history: TokenHistory | None = None
    """Given to drafters that ask for it (`Drafter.reads_history`)."""
    # [B, ...] `Drafter.request_states` where they lie elsewhere; None: the drafter's own
    states: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.anchors)

    def some(self, rows: torch.Tensor, chosen: Sequence[int] = ()) -> DeviceRequests:
        """Those at `rows` [n] of the batch.

        Args:
            chosen: the rows as the host knows them; needed where there is a `history`.
        """
        return replace(
            self,
            history=None if self.history is None else self.history.some(rows, chosen),
            anchors=self.anchors[rows],
            context_lens=self.context_lens[rows],
            budgets=self.budgets[rows],
            depths=self.depths[rows],
            rows=rows.to(self.depths.dtype),
        )


@dataclass(frozen=True)
class DeviceTrees:
    """Trees of R requests on the device; past its count a tree's entries may be anything."""

    # [R, N] int64
    token_ids: torch.Tensor
    # [R, N] int32, as in `DraftTree.parent_indices`
    parents: torch.Tensor
    # [R, N] int32
    depths: torch.Tensor
    # [R, N] float32
    scores: torch.Tensor
    # [R] int32
    counts: torch.Tensor

    @classmethod
    def none(cls, count: int, num_nodes: int, device: torch.device) -> DeviceTrees:
        """Empty trees of `count` requests."""
        import torch

        token_ids = torch.zeros((count, num_nodes), dtype=torch.int64, device=device)
        numbers = torch.zeros((count, num_nodes), dtype=torch.int32, device=device)
        scores = torch.zeros((count, num_nodes), dtype=torch.float32, device=device)
        return cls(token_ids, numbers, numbers, scores, numbers.new_zeros(count))

    @property
    def fields(self) -> tuple[torch.Tensor, ...]:
        """As kernels take them."""
        return self.token_ids, self.parents, self.depths, self.scores, self.counts

    def spread(self, rows: torch.Tensor, count: int) -> DeviceTrees:
        """The same as trees of `count` requests, which are those at `rows`; others have none."""
        fields = []
        for field_ in self.fields:
            whole = field_.new_zeros((count, *field_.shape[1:]))
            fields.append(whole.index_copy_(0, rows, field_))
        return DeviceTrees(*fields)
