# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks that each have an engine, as torchrun starts them; see `engine_process`.

vLLM calls it `external_launcher`: every rank has a scheduler of its own, which sees the outputs of
its own worker only.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from tests.e2e import engine_process
from tests.e2e.harness import EngineResult
from tests.side_by_side import NAME, run_side_by_side

NUM_RANKS = 2


def run_ranks(
    engine: dict[str, Any], calls: list[dict[str, Any]], folder: Path, *sabotage: str
) -> list[EngineResult]:
    """Runs `calls` on every rank; the result of each."""
    engine = {
        **engine, "tensor_parallel_size": NUM_RANKS,
        "distributed_executor_backend": "external_launcher",
    }  # fmt: skip
    job = folder / "ranks.job"
    made = {"engine": engine, "calls": calls, "sabotage": sabotage, "own_processes": False}
    job.write_text(json.dumps(made))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = [folder / f"ranks.json.{rank}" for rank in range(NUM_RANKS)]
    arguments = [[rank, port, str(job), str(result)] for rank, result in enumerate(results)]
    run_side_by_side("tests.e2e.own_schedulers", arguments, folder)
    read = [json.loads(result.read_text()) for result in results]
    return [EngineResult(data["calls"], data["counters"]) for data in read]


def main(rank: int, port: int, job: str, result: str) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    # vLLM names shared memory by what follows "env://".
    name, stock = os.environ[NAME], _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: name + stock(group).strip("/"))
    engine_process.main(job, result)
