# SPDX-License-Identifier: Apache-2.0
"""Drafts on the device as CUDA graphs, one for each captured number of requests and depth.

A graph holds a draft from its anchors to its trees. All graphs share the memory of what differs
from step to step. The inputs are the batch and the lines of the requests to draft for; the output
is one tree for each request of the batch. Before the replay the host decides which requests get a
draft, how deep, and of how many nodes; a graph reads these as lines, depths and budgets. Padding
requests have budget 0. Their rows are masked, and their trees go to a line of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.drafter import Drafter
from vllm_specplug.kernels import copy_to_device


def graph_depths(deepest: int, is_adaptive: bool) -> list[int]:
    """Returns the depths that drafts are captured for, ascending.

    A fixed budget asks for the deepest only. An adaptive one asks for many depths: graphs of half
    and a quarter of the deepest limit the levels drafted in vain, at three times the graphs.
    """
    if not is_adaptive:
        return [deepest]
    return sorted({deepest, -(-deepest // 2), -(-deepest // 4)})


# A subclass of vLLM's manager: after its memory profile, vLLM drops those among a speculator's
# attributes.
class DraftGraphs(CudaGraphManager):
    """Runs `Drafter.propose_on_device` from graphs.

    vLLM's manager decides which numbers of requests are captured: its capture sizes up to
    `max_num_seqs`.

    Args:
        drafter: a drafter with `drafts_from_graphs`.
        width: maximum children of a node; drafts of another width run without a graph.
        num_nodes: N, the maximum nodes of a tree.
        depths: ascending; a draft runs the first graph that is deep enough.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        drafter: Drafter,
        width: int,
        num_nodes: int,
        depths: Sequence[int],
    ) -> None:
        super().__init__(vllm_config, device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1)
        # The field for vLLM's bound on the rows of a request holds the depth here. Dispatch takes
        # the first graph that is large and deep enough.
        self._capture_descs = {
            mode: [replace(desc, max_query_len=depth) for desc in descs for depth in depths[::-1]]
            for mode, descs in self._capture_descs.items()
        }
        self._candidates = {
            key: [replace(desc, max_query_len=depth) for desc in descs for depth in depths]
            for key, descs in self._candidates.items()
        }
        self._drafter = drafter
        self._width, self._num_nodes, self._deepest = width, num_nodes, depths[-1]
        # Upper bound of the contexts in every step that a graph will serve.
        self._max_context: int = vllm_config.model_config.max_model_len
        # One more line, after those of the batch, is for padding requests.
        most = self.max_num_reqs
        self._padding = most
        # [B + 1, 4]: anchors, contexts, budgets and depths
        self.batch = torch.zeros((most + 1, 4), dtype=torch.int64, device=device)
        # [R] lines of the requests to draft for, on the device and on the host
        self.lines = torch.full((most,), most, dtype=torch.int64, device=device)
        self._lines = np.full(most, most, np.int64)
        # [B + 1, ...]; see `DeviceRequests.states`
        self.states: torch.Tensor | None = None
        if (states := drafter.request_states) is not None:
            self.states = states.new_zeros((most + 1, *states.shape[1:]))
        shape = (most + 1, num_nodes)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.trees = DeviceTrees(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, **ints),
            torch.zeros(shape, **ints),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(most + 1, **ints),
        )

    def capture_drafts(self) -> None:
        """Captures a draft for every number of requests and every depth. Captures none if the
        drafter does not support it."""
        if not self._drafter.can_be_captured:
            return

        def forward_of(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            # Contexts of 0: the pages of dummies may belong to a request.
            self.batch.zero_()
            assert desc.max_query_len is not None
            depth = desc.max_query_len
            return lambda mode: self._draft(desc.num_tokens, depth)

        self.capture(forward_of, "Capturing draft graphs")

    def __call__(
        self, requests: DeviceRequests, chosen: np.ndarray | None = None
    ) -> DeviceTrees | None:
        """Returns the trees of a batch, valid until the next call. Returns None, and drafts
        nothing, if no graph fits.

        Args:
            requests: all requests of the batch, in its order.
            chosen: int64, ascending lines of the requests to draft for; the others get empty trees.
                None for all.
        """
        if (requests.width, requests.num_nodes) != (self._width, self._num_nodes):
            return None
        if chosen is None:
            chosen = np.arange(len(requests))
        count, deepest = len(chosen), requests.max_depth or self._deepest
        desc = self.dispatch(
            count, count, uniform_token_count=1, num_active_loras=0, max_query_len=deepest
        )
        if desc.cg_mode != CUDAGraphMode.FULL or not self._drafter.enter_graph(requests):
            return None
        self._fill(requests, chosen, desc.num_tokens)
        self.run_fullgraph(desc)
        return DeviceTrees(*(tensor[: len(requests)] for tensor in vars(self.trees).values()))

    def _fill(self, requests: DeviceRequests, chosen: np.ndarray, num_requests: int) -> None:
        count = len(requests)
        columns = requests.anchors, requests.context_lens, requests.budgets, requests.depths
        torch.stack(columns, dim=1, out=self.batch[:count])
        lines = np.full(num_requests, self._padding)
        lines[: len(chosen)] = chosen
        # The lines stay the same from step to step while no request starts or ends.
        if not np.array_equal(lines, self._lines[:num_requests]):
            self._lines[:num_requests] = lines
            copy_to_device(lines, self.lines[:num_requests])
        if self.states is None:
            return
        states = self._drafter.request_states
        if states is None or len(states) != count:
            # No step came before this draft.
            self.states.zero_()
        else:
            self.states[:count].copy_(states)

    def _draft(self, num_requests: int, depth: int) -> None:
        lines = self.lines[:num_requests]
        anchors, contexts, budgets, depths = self.batch[lines].unbind(1)
        requests = DeviceRequests(
            anchors=anchors,
            context_lens=contexts.int(),
            budgets=budgets.int(),
            depths=depths.int(),
            width=self._width,
            num_nodes=self._num_nodes,
            max_context=self._max_context,
            # Padding requests have no block table. Their rows are masked, so any one will do.
            rows=lines.clamp_max(self._padding - 1).int(),
            max_depth=depth,
            states=self.states,
        )
        drafted = self._drafter.propose_on_device(requests)
        assert drafted is not None
        self.trees.counts.zero_()
        for name, tensor in vars(self.trees).items():
            tensor.index_copy_(0, lines, vars(drafted)[name])
