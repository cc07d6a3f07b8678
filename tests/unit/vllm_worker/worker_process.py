# SPDX-License-Identifier: Apache-2.0
"""One of two processes with a worker each, in groups of vLLM's own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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

# One that waits for the other for long fails.
TIMEOUT = timedelta(seconds=90)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("no room on this device")


def failing_rank(rank: int, where: str) -> list[str]:
    """What a rank says, of which the second one fails.

    Args:
        where: "draft" (in every draft forward), "forward" (in the fourth forward of the target), or
            "collective" (the same where forwards are collectives).
    """
    init_distributed_environment(2, rank, "env://", rank, "gloo", TIMEOUT)
    initialize_model_parallel(2)
    # By these times, ranks choose kernels.
    assert ranks.slowest_rank_values([float(rank), -float(rank)]) == [1.0, 0.0]
    worker: Any = ClockedRunner()
    stock = worker._dummy_run
    if rank == 1 and where == "draft":
        worker.drafter.drafter.propose = fail
    elif rank == 1:
        worker._dummy_run = lambda rows, **kwargs: (
            fail() if len(worker.rows) == 3 else stock(rows, **kwargs)
        )
    if where == "collective":
        ranks.PATIENCE = timedelta(seconds=2)
        alone = worker._dummy_run

        def together(rows: int, **kwargs: Any) -> Any:
            hidden = alone(rows, **kwargs)
            torch.distributed.all_reduce(hidden[0], group=get_world_group().device_group)
            return hidden

        worker._dummy_run = together
    try:
        with worker.clock():
            warm_up_draft(worker.state)
            start_budget(worker.planner, worker.state)
    except (RuntimeError, SystemExit) as error:
        # vLLM's workers outlive the first; see the test.
        return [type(error).__name__, str(error)]
    return []


class Replica(ClockedRunner):
    """A forward of experts is a collective of all replicas, for which a barrier stands here."""

    def _dummy_run(self, rows: int, context_len: int, **kwargs: Any) -> Any:
        torch.distributed.monitored_barrier(timeout=TIMEOUT)
        return super()._dummy_run(rows, context_len, **kwargs)


def replica(rank: int) -> dict[str, Any]:
    """What a replica of a target with experts measures; the second one's machine is slower."""
    init_distributed_environment(1, 0, "env://", 0, "gloo")
    initialize_model_parallel(1)
    made = Replica(row_ms=0.02 + 3.0 * rank)
    with made.clock():
        start_budget(made.planner, made.state)
    torch.distributed.monitored_barrier(timeout=TIMEOUT)
    return {"rows": made.rows, "ms": float(made.planner.adaptive.costs.verify_ms(8, 8, 0))}


def main(role: str, folder: str, env: dict[str, str], *arguments: Any) -> None:
    """Writes what a function of this module returns into a file of its rank."""
    os.environ.update(env)
    run: Callable[..., Any] = {"rank": failing_rank, "replica": replica}[role]
    with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig())):
        said = run(*arguments)
    (Path(folder) / f"{arguments[0]}.json").write_text(json.dumps(said))
