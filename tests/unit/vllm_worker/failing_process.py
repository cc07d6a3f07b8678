# SPDX-License-Identifier: Apache-2.0
"""One of two workers; the second fails.

Groups are vLLM's own. WHERE is what fails: "draft", every draft forward, "forward", the fourth
forward of the target, or "collective", the same where forwards are collectives. A worker that waits
for the other one for long fails too.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
)

from tests.unit.vllm_worker.clocked_runner import ClockedRunner
from vllm_specplug.vllm_worker import ranks
from vllm_specplug.vllm_worker.cost.calibration import start_budget
from vllm_specplug.vllm_worker.warmup import warm_up_draft

TIMEOUT = timedelta(seconds=90)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("no room on this device")


def main(rank: int, port: int, folder: str, where: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig())):
        init_distributed_environment(2, rank, "env://", rank, "gloo", TIMEOUT)
        initialize_model_parallel(2)
        # By these times, ranks choose kernels.
        assert ranks.slowest_rank_values([float(rank), -float(rank)]) == [1.0, 0.0]
        worker: Any = ClockedRunner()
        stock = worker._dummy_run
        if rank == 1 and where == "draft":
            worker.drafter.drafter.propose = fail
        elif rank == 1:
            worker._dummy_run = lambda rows, **kwargs: (  # type: ignore[method-assign]
                fail() if len(worker.rows) == 3 else stock(rows, **kwargs)
            )
        if where == "collective":
            ranks.PATIENCE = timedelta(seconds=2)
            alone = worker._dummy_run

            def together(rows: int, **kwargs: Any) -> Any:
                hidden = alone(rows, **kwargs)
                torch.distributed.all_reduce(hidden[0], group=get_world_group().device_group)
                return hidden

            worker._dummy_run = together  # type: ignore[method-assign]
        said: list[str] = []
        try:
            with worker.clock():
                warm_up_draft(worker.state)
                start_budget(worker.planner, worker.state)
        except (RuntimeError, SystemExit) as error:
            # vLLM's workers outlive the first; see the test.
            said = [type(error).__name__, str(error)]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(said))
