# SPDX-License-Identifier: Apache-2.0
"""N-gram branches on the device: looked up in vLLM's own token history, merged into a head's trees.

Branches are those of `drafting.ngram`, whose statistics stay on the host: it learns of branches and
of what followed them from copies, a step late, and sends the scores as one small table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.ngram import NgramBranches
from vllm_specplug.kernels import to_device

# Matched suffix lengths int32 [R, C], and tokens int32 [R, C, L], of `kernels.ngram_lookup_triton`.
Found = tuple[torch.Tensor, torch.Tensor]


def keep_history_on_device(req_states: Any) -> None:
    """Moves the tokens of all requests into the device's memory: 4 bytes for each of
    `max_num_seqs` x `max_model_len`.

    vLLM keeps them in the host's, mapped, unless its own n-gram drafter reads them: a lookup would
    fetch a whole history over the bus in every step. To be called before anything was written.

    Seam: device_ngrams.
    """
    req_states.all_token_ids = StagedWriteTensor(
        (req_states.max_num_reqs, req_states.max_model_len),
        dtype=torch.int32,
        device=req_states.device,
        uva_instead_of_gpu=False,
    )


class DeviceNgrams:
    """The n-gram branches of a batch.

    Args:
        branches: the host's, for their statistics.
        count: most branches of a request.
        max_tokens: most tokens of a request.
    """

    def __init__(
        self, branches: NgramBranches, count: int, max_tokens: int, device: torch.device
    ) -> None:
        from vllm_specplug.kernels.ngram_lookup_triton import NgramLookup

        self.statistics = branches.statistics
        self.longest, self.length = branches.suffix, branches.max_length
        self.device = device
        self._lookup = NgramLookup(self.longest, count, self.length, max_tokens)
        self._table = torch.empty(0)
        self._known = -1

    def lookup(
        self,
        # [S, most tokens] int32
        history: torch.Tensor,
        # [R] int64
        slots: torch.Tensor,
        # [R] int32
        lengths: torch.Tensor,
        requests: DeviceRequests,
    ) -> Found:
        """What followed the last tokens of each request.

        Args:
            lengths: tokens of each request, 0 where nothing is looked up.
        """
        # The bound is the forward's; what it emits comes behind.
        return self._lookup(history, slots, lengths, requests.depths, requests.max_context + 1)

    def merged(
        self,
        trees: DeviceTrees | None,
        found: Found,
        requests: DeviceRequests,
        *,
        lookup_only: bool,
    ) -> list[DeviceTrees]:
        """The trees with the branches merged in, within budget, and where asked for those of
        branches only."""
        from vllm_specplug.kernels.tree_merge_triton import merge_branches

        head = None if trees is None else trees.fields
        merged = merge_branches(
            head,
            *found,
            self.table(),
            requests.budgets,
            requests.num_nodes,
            lookup_only=lookup_only,
        )
        return [DeviceTrees(*fields) for fields in merged]

    def table(self) -> torch.Tensor:
        """Scores by suffix length, rank and depth, on the device."""
        if self._known != self.statistics.observed:
            self._known = self.statistics.observed
            self._table = to_device(self.statistics.table(self.longest, self.length), self.device)
        return self._table

    def learn(self, found: Sequence[tuple[int, list[int]]], actual: np.ndarray) -> None:
        """Compares a request's branches with the tokens that followed."""
        tokens = actual[: self.length].tolist()
        for rank, (size, branch) in enumerate(found):
            self.statistics.observe(size, rank, branch, tokens)

    def warm_up(self, history: torch.Tensor, num_nodes: int) -> None:
        """Compiles what a step launches."""
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        requests = DeviceRequests(slot, one, one, one, 1, num_nodes, 2)
        found = self.lookup(history, slot, one, requests)
        lookup_only = self.merged(None, found, requests, lookup_only=True)[1]
        self.merged(lookup_only, found, requests, lookup_only=False)
