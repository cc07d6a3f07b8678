# SPDX-License-Identifier: Apache-2.0
"""`Drafter.observe` as CUDA graphs, one for each captured number of rows.

The operations that compute a draft head's context, launched one by one, take the host longer than
the rest of a draft. A graph reads the target's hidden states where the target's own graphs write
them. Each step copies its rows, positions and slots into memory that all graphs share. Padding rows
have slot -1, for which caches store nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.drafter import Drafter


# A subclass of vLLM's manager: after its memory profile, vLLM drops those among a speculator's
# attributes.
class ContextGraphs(CudaGraphManager):
    """Runs `Drafter.observe` from graphs, in vLLM's capture sizes.

    Args:
        drafter: one that `observes_from_graphs`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, drafter: Drafter) -> None:
        most = max(vllm_config.compilation_config.cudagraph_capture_sizes)
        # Any number of requests may share a step's rows.
        super().__init__(
            vllm_config, device, CUDAGraphMode.FULL_DECODE_ONLY, most, varlen_decode=True
        )
        self._drafter = drafter
        # [T, 3]: rows of the forward, positions and slots
        self.columns = torch.zeros((most, 3), dtype=torch.int64, device=device)
        # Of each auxiliary layer [T, H]; empty before the capture.
        self._states: list[torch.Tensor] = []

    def capture_contexts(self, states: list[torch.Tensor]) -> None:
        """Captures `observe` for every capture size.

        Args:
            states: output [T, H] of each auxiliary layer, at the address that the target's graphs
                write to; empty where nothing is captured.
        """
        if not states:
            return
        self._states = states
        self.columns[:, 2] = -1

        def forward_of(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            return lambda mode: self._observe(desc.num_tokens)

        self.capture(forward_of, "Capturing context graphs")

    def __call__(self, committed: CommittedTokens) -> bool:
        """Shows the drafter a step's tokens. Returns False, and does nothing, if no graph fits."""
        aux, count = committed.aux_hidden_states, len(committed.rows)
        # A forward that ran without a graph wrote its outputs to another address.
        if not self._states or aux[0].data_ptr() != self._states[0].data_ptr():
            return False
        desc = self.dispatch(1, count, None, num_active_loras=0, max_query_len=1)
        if desc.cg_mode != CUDAGraphMode.FULL:
            return False
        columns = committed.rows, committed.positions, committed.slots
        torch.stack(columns, dim=1, out=self.columns[:count])
        if count < desc.num_tokens:
            self.columns[count : desc.num_tokens, 2] = -1
        self.run_fullgraph(desc)
        return True

    def _observe(self, count: int) -> None:
        rows, positions, slots = self.columns[:count].t().contiguous()
        self._drafter.observe(
            CommittedTokens(
                aux_hidden_states=self._states, rows=rows, positions=positions, slots=slots
            )
        )
