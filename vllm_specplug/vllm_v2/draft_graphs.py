# SPDX-License-Identifier: Apache-2.0
"""Draft forwards of block heads as CUDA graphs, one for each captured number of requests.

A graph holds a draft from its anchors to its trees. What differs from step to step lies in memory
that all graphs share: the requests go in, and trees come out there. Requests that fill a batch up
have a budget of 0: no row of theirs is attended, and their trees are empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_specplug.drafting.drafter import DeviceRequests, DeviceTrees

Propose = Callable[[DeviceRequests], DeviceTrees | None]


class DraftGraphs(CudaGraphManager):
    """Runs `Drafter.propose_on_device`, from a graph where one was captured.

    vLLM's manager decides which numbers of requests are captured: its sizes, up to
    `max_num_seqs`.

    Args:
        propose: has no host synchronisation; what it launches depends on the number of requests
            alone.
        width: most children of a node; drafts of another width run without a graph.
        num_nodes: N, nodes of a tree at most.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, propose: Propose, width: int, num_nodes: int
    ) -> None:
        super().__init__(vllm_config, device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1)
        self._propose = propose
        self._width, self._num_nodes = width, num_nodes
        # Bounds the contexts of every step that a graph will serve.
        self._max_context: int = vllm_config.model_config.max_model_len
        most = self.max_num_reqs
        # [R, 4]: anchors, contexts, budgets and depths
        self.requests = torch.zeros((most, 4), dtype=torch.int64, device=device)
        ids = torch.zeros((most, num_nodes), dtype=torch.int64, device=device)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.trees = DeviceTrees(
            ids,
            torch.zeros((most, num_nodes), **ints),
            torch.zeros((most, num_nodes), **ints),
            torch.zeros((most, num_nodes), dtype=torch.float32, device=device),
            torch.zeros(most, **ints),
        )

    def capture_drafts(self) -> None:
        """Captures a draft for every number of requests."""

        def forward_of(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            # Nothing is attended: pages of dummies may be anybody's.
            self.requests.zero_()
            return lambda mode: self._draft(desc.num_tokens)

        self.capture(forward_of, "Capturing draft graphs")

    def __call__(self, requests: DeviceRequests) -> DeviceTrees | None:
        """The trees of R requests, valid until the next call."""
        count = len(requests)
        is_captured = (requests.width, requests.num_nodes) == (self._width, self._num_nodes)
        if not is_captured or requests.rows is not None or requests.deepest is not None:
            return self._propose(requests)
        desc = self.dispatch(count, count, uniform_token_count=1, num_active_loras=0)
        if desc.cg_mode != CUDAGraphMode.FULL:
            return self._propose(requests)
        columns = requests.anchors, requests.context_lens, requests.budgets, requests.depths
        torch.stack(columns, dim=1, out=self.requests[:count])
        if count < desc.num_tokens:
            self.requests[count : desc.num_tokens] = 0
        self.run_fullgraph(desc)
        return DeviceTrees(*(tensor[:count] for tensor in vars(self.trees).values()))

    def _draft(self, count: int) -> None:
        anchors, contexts, budgets, depths = self.requests[:count].unbind(1)
        requests = DeviceRequests(
            anchors=anchors,
            context_lens=contexts.int(),
            budgets=budgets.int(),
            depths=depths.int(),
            width=self._width,
            num_nodes=self._num_nodes,
            max_context=self._max_context,
        )
        drafted = self._propose(requests)
        assert drafted is not None
        for name, tensor in vars(self.trees).items():
            tensor[:count] = vars(drafted)[name]
