# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks that each have an engine, as torchrun starts them; see `engine_process`.

vLLM calls it `external_launcher`: every rank has a scheduler of its own, which sees the outputs of
its own worker only.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.e2e import engine_process
from tests.e2e.fork_server import run_forked
from tests.e2e.harness import EngineResult

NUM_RANKS = 2
_TIME_LIMIT_S = 300.0


def run_ranks(
    engine: dict[str, Any], calls: list[dict[str, Any]], folder: Path, *sabotage: str
) -> list[EngineResult]:
    """Runs `calls` on every rank; the result of each.

    Raises:
        AssertionError: with the end of the log when a rank fails.
    """
    engine = {
        **engine, "tensor_parallel_size": NUM_RANKS,
        "distributed_executor_backend": "external_launcher",
    }  # fmt: skip
    job, result, log = (folder / f"ranks.{kind}" for kind in ("job", "json", "log"))
    made = {"engine": engine, "calls": calls, "sabotage": sabotage, "own_processes": False}
    job.write_text(json.dumps(made))
    status = run_forked("tests.e2e.own_schedulers", [str(job), str(result)], log)
    if status:
        raise AssertionError(f"ranks ended with {status}:\n{log.read_text()[-6000:]}")
    read = [json.loads(_of_rank(result, rank).read_text()) for rank in range(NUM_RANKS)]
    return [EngineResult(data["calls"], data["counters"]) for data in read]


def _of_rank(result: str | Path, rank: int) -> Path:
    return Path(f"{result}.{rank}")


def _run_rank(rank: int, port: int, job: str, result: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    engine_process.main(job, str(_of_rank(result, rank)))
    # Without exit handlers: they wait for the other rank.
    os._exit(0)


def main(job: str, result: str) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # vLLM names shared memory by what follows "env://", and does not remove it.
    name, stock = f"specplug_ranks_{port}", _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: name + stock(group).strip("/"))
    fork = multiprocessing.get_context("fork")
    ranks: list[BaseProcess] = [
        fork.Process(target=_run_rank, args=(rank, port, job, result)) for rank in range(NUM_RANKS)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + _TIME_LIMIT_S
    # A rank that fails leaves the others in a collective.
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode for rank in ranks):
            break
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
        rank.join()
    for left in Path("/dev/shm").glob(f"{name}*"):
        left.unlink()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(1)
