# SPDX-License-Identifier: Apache-2.0
"""An engine of tensor parallel ranks as on CUDA, in Triton's interpreter; see
`engine_process`. To be run with SPECPLUG_INTERPRETED=1, set before vLLM is imported.

Ranks hear of their steps at different times: nothing but what they know at the same time makes them
agree. What each does is noted in a file of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e import engine_process
from tests.e2e.cuda import cuda_device
from tests.e2e.cuda.cuda_pairs import LateCopy
from tests.e2e.sabotage import is_later_rank
from vllm_specplug.methods.tokenswift.drafter import TokenSwiftDrafter
from vllm_specplug.vllm_v2 import host_step
from vllm_specplug.vllm_worker.device_self_draft import DevicePartialAttention


class LateOnLaterRanks(LateCopy):
    """Copies come at once on the first rank, and on the others two steps later."""

    @property
    def has_arrived(self) -> bool:
        return not is_later_rank() or super().has_arrived


def _note(folder: Path) -> None:
    """Every draft writes a line: what the rank drafted from, and which requests had partial caches
    in its forward."""
    propose, attention = TokenSwiftDrafter.propose_on_device, DevicePartialAttention.__init__
    partial: list[int] = []

    def made(self: Any, *args: Any) -> None:
        attention(self, *args)
        partial[:] = self.partial

    def proposed(self: Any, requests: Any) -> Any:
        partial.clear()
        trees = propose(self, requests)
        history, pool = requests.history, self.target_forward.pool
        late = sum(
            least > pool.budget
            for least, drafted in zip(history.min_context_lens, history.is_drafted, strict=True)
            if drafted
        )
        note = {
            "requests": history.req_ids,
            "source": self._source(requests),
            "partial": list(partial),
            "would_fit_by_late_bounds": late <= pool.max_requests,
        }
        rank = int(is_later_rank())
        with (folder / f"rank{rank}.jsonl").open("a") as lines:
            lines.write(json.dumps(note) + "\n")
        return trees

    DevicePartialAttention.__init__ = made  # type: ignore[method-assign]
    TokenSwiftDrafter.propose_on_device = proposed  # type: ignore[method-assign]


def main(job: str, result: str, notes: str) -> None:
    cuda_device.use_worker()
    host_step.HostCopy = LateOnLaterRanks  # type: ignore[misc]
    _note(Path(notes))
    engine_process.main(job, result)
