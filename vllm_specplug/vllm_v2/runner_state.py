# SPDX-License-Identifier: Apache-2.0
"""A V2 runner seen from outside a step: forwards and draft forwards without requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_specplug.drafting.drafter import DrafterOptions

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter


class RunnerState:
    """What calibration needs of a V2 runner (`vllm_worker.calibration.MeasuredRunner`).

    Args:
        runner: vLLM's runner with `TreeRunnerV2Mixin`.
    """

    name = "V2"

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        # The block table has a line for every slot, whatever runs.
        self.rehearsal_requests = 0

    @property
    def vllm_config(self) -> Any:
        return self._runner.vllm_config

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def max_requests(self) -> int:
        return self._runner.max_num_reqs

    @property
    def max_rows(self) -> int:
        return self._runner.max_num_tokens

    @property
    def drafter(self) -> Drafter:
        return self._runner.drafter.drafter

    @property
    def drafter_options(self) -> DrafterOptions:
        return self._runner.drafter.options

    def dummy_forward(self, rows: int, context: int) -> torch.Tensor:
        """See the protocol; vLLM makes a request of each row while there are slots."""
        rows_of_one = -(-rows // min(rows, self.max_requests))
        hidden, _ = self._runner._dummy_run(rows, context_len=max(0, context - rows_of_one))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._runner.model.compute_logits(hidden)

    def wait_for_device(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
