# SPDX-License-Identifier: Apache-2.0
"""A runner whose forwards take as long as their rows and context say, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from vllm_specplug.budget.step_cost import Calibration
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker.cost.calibration import Calibrator
from vllm_specplug.vllm_worker.cost.step_clock import StepClock
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.target.state_layers import StateLayers


class ClockedDrafter:
    attends_context = False
    forward_depth = warmup_depth = 3
    drafts_by_level = drafts_on_device = False

    def __init__(self, take: Callable[[float], None]) -> None:
        self.take = take
        self.seen: list[Any] = []
        self.forgotten: set[str] = set()

    def propose(self, requests: Any) -> list[DraftTree]:
        self.seen.append(requests)
        self.take(6e-3)
        return [DraftTree.empty()] * len(requests)

    def warmup(self, requests: Any) -> None:
        self.propose(requests)

    def forget(self, req_ids: list[str]) -> None:
        self.forgotten |= set(req_ids)


class ClockedRunner:
    """Forwards take `base_ms` and a little for each row and token of context."""

    max_num_tokens = 64
    max_model_len = 1024
    device = torch.device("cpu")
    lora_config = None
    speculator = None

    def __init__(self, row_ms: float = 0.02, base_ms: float = 1.0) -> None:
        self.row_ms, self.base_ms, self.now = row_ms, base_ms, 0.0
        self.rows: list[int] = []
        self.state = RunnerView(self)
        self.planner: Any = SimpleNamespace(
            is_adaptive=True, adaptive=None, clock=StepClock(),
            row_budget=SimpleNamespace(max_step_rows=64),
        )  # fmt: skip
        self.tree_backend = SimpleNamespace(warmup_rows=0, is_host=True)
        self.step = SimpleNamespace(has_dummy_rows=False)
        # Of a later pipeline stage.
        self.intermediate_tensors = None
        self.model = SimpleNamespace(compute_logits=lambda hidden: self.take(1e-4))
        self.drafter = SimpleNamespace(
            drafter=ClockedDrafter(lambda seconds: self.take(seconds)),
            options=SimpleNamespace(num_nodes=8, tree_width=4, vocab_size=100),
            state_layers=StateLayers(),
        )
        self.scheduler_config = SimpleNamespace(max_num_seqs=16)
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(max_step_rows=None))

    def take(self, seconds: float) -> None:
        self.now += seconds

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Inside, time passes only where this runner takes it."""
        with patch("time.perf_counter", lambda: self.now):
            yield

    def measure(
        self,
        share: Callable[[list[float]], list[float]] = lambda values: values,
        **options: Any,
    ) -> Calibration:
        """A calibration of this runner."""
        with self.clock():
            return Calibrator(self.state, share, **options).measure()

    def _dummy_run(
        self, rows: int, context_len: int, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows.append(rows)
        # Requests as vLLM makes them: rows are spread evenly, behind the context.
        context = context_len + -(-rows // min(rows, self.max_num_reqs))
        self.take(1e-3 * (self.base_ms + self.row_ms * rows + 2e-5 * rows * context))
        return torch.zeros(rows, 4), torch.zeros(1, 4)

    @property
    def max_num_reqs(self) -> int:
        return self.scheduler_config.max_num_seqs
