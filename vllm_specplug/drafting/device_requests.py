# SPDX-License-Identifier: Apache-2.0
"""Requests to draft for and their trees, on a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_specplug.drafting.requests import DraftPenalties, DraftRequests

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TokenHistory:
    """The tokens of R requests on the device, and what the host knows about them."""

    # [S, max tokens] int32; entries past the end of a request are undefined
    token_ids: torch.Tensor
    # [R] int64 line of `token_ids` of each request
    lines: torch.Tensor
    # [R]
    req_ids: list[str]
    # [R] Between two drafts for a request it grows at least as much as the request does
    len_upper_bounds: list[int]
    # [R] whether a request may get a draft
    is_drafted: list[bool]
    # [R] bounds of `DeviceRequests.context_lens`; the lower one is one or two steps old
    min_context_lens: list[int]
    max_context_lens: list[int]
    # None if no request has a penalty
    penalties: DraftPenalties | None = None

    def select(self, rows: torch.Tensor, host_rows: Sequence[int]) -> TokenHistory:
        """Returns the history of the requests at `rows` [n], which `host_rows` repeats."""

        def chosen(values: list[Any]) -> list[Any]:
            return [values[r] for r in host_rows]

        return replace(
            self,
            lines=self.lines[rows],
            req_ids=chosen(self.req_ids),
            len_upper_bounds=chosen(self.len_upper_bounds),
            is_drafted=chosen(self.is_drafted),
            min_context_lens=chosen(self.min_context_lens),
            max_context_lens=chosen(self.max_context_lens),
            penalties=None if self.penalties is None else self.penalties.select(rows),
        )


@dataclass(frozen=True)
class DeviceRequests:
    """The R requests of a batch to draft for, with their tokens on the device."""

    # [R] int64, see `DraftRequests.anchors`; undefined where the budget is 0
    anchors: torch.Tensor
    # [R] int32
    context_lens: torch.Tensor
    # [R] int32, 0 for requests that get no draft
    budgets: torch.Tensor
    # [R] int32
    depths: torch.Tensor
    width: int
    """Maximum children per node, over all requests."""
    num_nodes: int
    """N, at least the largest budget."""
    max_context: int
    """Upper bound of the context lengths."""
    # [R] int32 row of each request in the batch and in the block table; None for 0, 1, ...
    rows: torch.Tensor | None = None
    max_depth: int | None = None
    """Upper bound of the depths that the host knows; None for none."""
    history: TokenHistory | None = None
    """Given to drafters that request it (`Drafter.reads_history`)."""
    # [B, ...] copy of `Drafter.request_states` to read; None for the drafter's own
    states: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.anchors)

    @classmethod
    def of(cls, requests: DraftRequests, num_nodes: int, device: torch.device) -> DeviceRequests:
        """Returns the host's requests, the first of the batch, with their tokens on the device."""
        import torch

        from vllm_specplug.kernels import to_device

        limits = requests.context_lens, requests.budgets, requests.depths
        context_lens, budgets, depths = to_device(np.array(limits, np.int32), device)
        token_ids = np.zeros((len(requests), 1 + max(requests.context_lens)), np.int32)
        for line, tokens in zip(token_ids, requests.token_ids, strict=True):
            line[: len(tokens)] = tokens
        return cls(
            anchors=to_device(np.array(requests.anchors), device),
            context_lens=context_lens,
            budgets=budgets,
            depths=depths,
            width=requests.width,
            num_nodes=num_nodes,
            max_context=max(requests.context_lens),
            max_depth=max(requests.depths),
            history=TokenHistory(
                to_device(token_ids, device),
                torch.arange(len(requests), device=device),
                requests.req_ids,
                [len(tokens) for tokens in requests.token_ids],
                [True] * len(requests),
                requests.context_lens,
                requests.context_lens,
            ),
        )

    def select(self, rows: torch.Tensor, host_rows: Sequence[int] = ()) -> DeviceRequests:
        """Returns the requests at `rows` [n] of the batch.

        Args:
            host_rows: the same rows on the host; required with a `history`.
        """
        return replace(
            self,
            history=None if self.history is None else self.history.select(rows, host_rows),
            anchors=self.anchors[rows],
            context_lens=self.context_lens[rows],
            budgets=self.budgets[rows],
            depths=self.depths[rows],
            rows=rows.to(self.depths.dtype),
        )


@dataclass(frozen=True)
class DeviceTrees:
    """Trees of R requests on the device; entries past the count of a tree are undefined."""

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
        """Returns empty trees for `count` requests."""
        import torch

        token_ids = torch.zeros((count, num_nodes), dtype=torch.int64, device=device)
        numbers = torch.zeros((count, num_nodes), dtype=torch.int32, device=device)
        scores = torch.zeros((count, num_nodes), dtype=torch.float32, device=device)
        return cls(token_ids, numbers, numbers, scores, numbers.new_zeros(count))

    @property
    def fields(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of kernel arguments."""
        return self.token_ids, self.parents, self.depths, self.scores, self.counts

    def scatter(self, rows: torch.Tensor, count: int) -> DeviceTrees:
        """Returns the trees of `count` requests: these at `rows` [R], and empty ones elsewhere."""
        scattered = [
            part.new_zeros((count, *part.shape[1:])).index_copy_(0, rows, part)
            for part in self.fields
        ]
        return DeviceTrees(*scattered)
