# SPDX-License-Identifier: Apache-2.0
"""One replica of a mixture-of-experts target.

Groups are vLLM's own, for two replicas of one worker each. A forward of such a target is a
collective of both, for which a barrier stands here; the second replica's machine is slower.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from tests.unit.vllm_worker.clocked_runner import ClockedRunner
from vllm_specplug.vllm_worker.cost.calibration import start_budget

TIMEOUT = timedelta(seconds=30)


class Replica(ClockedRunner):
    def _dummy_run(self, rows: int, context_len: int, **kwargs: Any) -> Any:
        torch.distributed.monitored_barrier(timeout=TIMEOUT)
        return super()._dummy_run(rows, context_len, **kwargs)


def main(rank: int, port: int, folder: str) -> None:
    os.environ.update(VLLM_DP_SIZE="2", VLLM_DP_RANK=str(rank), VLLM_DP_MASTER_PORT=str(port))
    with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig())):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1)
        replica = Replica(row_ms=0.02 + 3.0 * rank)
        with replica.clock():
            start_budget(replica.planner, replica.state)
    torch.distributed.monitored_barrier(timeout=TIMEOUT)
    adaptive = replica.planner.adaptive
    (Path(folder) / f"{rank}.json").write_text(
        json.dumps({"rows": replica.rows, "ms": float(adaptive.costs.verify_ms(8, 8, 0))})
    )
