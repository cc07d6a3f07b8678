# SPDX-License-Identifier: Apache-2.0
"""N-gram branches on the device: looked up in vLLM's own token history, merged into a head's trees.

The statistics of `drafting.ngram` stay on the host. It reads the branches, and the tokens that
followed them, from copies one step late. It sends the scores to the device as one small table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.ngram import MAX_SUFFIX, NgramBranches
from vllm_specplug.kernels import to_device

# Matched suffix lengths int32 [R, C], and tokens int32 [R, C, L], of `kernels.ngram_lookup_triton`.
Found = tuple[torch.Tensor, torch.Tensor]


def keep_history_on_device(req_states: Any) -> None:
    """Moves the token ids of all requests into the device's memory.

    They take 4 bytes for each of `max_num_seqs` x `max_model_len` tokens. vLLM keeps them in mapped
    host memory unless its own n-gram drafter reads them, and each lookup would then fetch a whole
    history over the bus. Call this before anything is written.

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
        branches: the host's branches, which hold the statistics.
        count: maximum number of branches per request.
        max_tokens: maximum number of tokens per request.
    """

    def __init__(
        self, branches: NgramBranches, count: int, max_tokens: int, device: torch.device
    ) -> None:
        from vllm_specplug.kernels.ngram_lookup_triton import NgramLookup

        self.statistics = branches.statistics
        self.longest, self.length = MAX_SUFFIX, branches.max_length
        self.device = device
        self._lookup = NgramLookup(self.longest, count, self.length, max_tokens)
        self._table = torch.empty(0)
        self._known = -1

    def lookup(
        self,
        # [S, max_tokens] int32
        history: torch.Tensor,
        # [R] int64
        slots: torch.Tensor,
        # [R] int32
        lengths: torch.Tensor,
        requests: DeviceRequests,
    ) -> Found:
        """Looks up what followed earlier occurrences of each request's last tokens.

        Args:
            lengths: number of tokens of each request, 0 for requests without a lookup.
        """
        # `max_context` bounds the tokens of the forward; the token it emits adds one.
        return self._lookup(history, slots, lengths, requests.depths, requests.max_context + 1)

    def merged(
        self,
        trees: DeviceTrees | None,
        found: Found,
        requests: DeviceRequests,
        *,
        lookup_only: bool,
    ) -> list[DeviceTrees]:
        """Returns the trees with the branches merged in, within budget. With `lookup_only`, the
        list also has the trees made of branches only."""
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
        """Returns the scores by suffix length, rank and depth, on the device."""
        if self._known != self.statistics.num_observed:
            self._known = self.statistics.num_observed
            self._table = to_device(self.statistics.table(self.longest, self.length), self.device)
        return self._table

    def learn(self, found: Sequence[tuple[int, list[int]]], actual: np.ndarray) -> None:
        """Compares a request's branches with the tokens that followed."""
        tokens = actual[: self.length].tolist()
        for rank, (size, branch) in enumerate(found):
            self.statistics.observe(size, rank, branch, tokens)

    def warm_up(self, history: torch.Tensor, num_nodes: int) -> None:
        """Compiles the kernels that a step launches."""
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        requests = DeviceRequests(slot, one, one, one, 1, num_nodes, 2)
        found = self.lookup(history, slot, one, requests)
        lookup_only = self.merged(None, found, requests, lookup_only=True)[1]
        self.merged(lookup_only, found, requests, lookup_only=False)
