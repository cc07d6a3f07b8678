# SPDX-License-Identifier: Apache-2.0
"""A V2 runner seen from outside: forwards beside its steps, and its block table.

Seam: runner_v2_state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm_specplug.drafting.drafter import DraftRequests
from vllm_specplug.kernels import to_device
from vllm_specplug.vllm_attention.state_rows import StateStep
from vllm_specplug.vllm_worker.runner_view import RunnerView


class RunnerState(RunnerView):
    """A V2 model runner, or a subclass's instance, seen from outside.

    Args:
        runner: vLLM's runner with `TreeRunnerV2Mixin`.
    """

    name = "V2"

    def state_step(self, requests: Any, parents: torch.Tensor) -> StateStep:
        make: type[StateStep] = self.runner.tree_backend.state_step
        return make(requests, to_device(parents.numpy(), self.device))

    def dummy_forward(self, rows: int, context: int) -> torch.Tensor:
        # vLLM makes a request of each row while there are slots, and puts the context before it.
        longest = -(-rows // min(rows, self.max_requests))
        hidden, _ = self.runner._dummy_run(rows, context_len=max(0, context - longest))
        return hidden

    def trees_forward(self, trees: int, context: int) -> None:
        rows = self.drafter_options.num_nodes + 1
        self.runner._dummy_run(
            trees * rows, uniform_decode=True, context_len=max(0, context - rows)
        )

    def draft(self, requests: DraftRequests) -> None:
        graphs = getattr(self.runner.speculator, "draft_graphs", None)
        if graphs is None or not graphs.rehearse(requests):
            super().draft(requests)

    @contextmanager
    def dummy_adapters(self) -> Iterator[None]:
        with super().dummy_adapters():
            # V2's dummy forwards make adapters and remove them, every one of them.
            self.runner.has_dummy_adapters = True
            try:
                yield
            finally:
                self.runner.has_dummy_adapters = False

    def adapters(self, req_indices: Sequence[int]) -> tuple[list[int], set[Any]]:
        ids, requests = self.runner.step_adapters
        # A rehearsal's requests are in no batch.
        return [ids[i] if i < len(ids) else 0 for i in req_indices], requests

    def wait_for_device(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def block_table(self, group: int = 0) -> torch.Tensor:
        # A line for every slot; those of the batch come first.
        table: torch.Tensor = self.runner.block_tables.input_block_tables[group]
        return table
