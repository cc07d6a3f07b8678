# SPDX-License-Identifier: Apache-2.0
"""Processes that talk to each other, forked from one that has imported vLLM."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.e2e.fork_server import run_forked

# vLLM names shared memory by it.
NAME = "VLLM_DIST_IDENT"


def run_side_by_side(
    module: str, arguments: list[list[Any]], folder: Path, *, timeout_s: float = 300.0
) -> None:
    """Runs `main` of a module in a process for each list of arguments.

    Raises:
        AssertionError: with the end of the log when one of them fails.
    """
    log, name = folder / "side_by_side.log", f"specplug-test-{uuid4().hex}"
    job = [module, json.dumps(arguments)]
    try:
        status = run_forked("tests.side_by_side", job, log, env={NAME: name}, timeout_s=timeout_s)
    finally:
        # Processes that end without their destructors leave their shared memory.
        for left in Path("/dev/shm").glob(f"{name}*"):
            left.unlink()
    assert status == 0, log.read_text()[-8000:]


def main(module: str, arguments: str) -> None:
    """The job of `run_side_by_side`; leaves none of the processes behind."""
    run = importlib.import_module(module).main
    children = set()
    for each in json.loads(arguments):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(*each)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.add(pid)
    failed = False
    while children and not failed:
        pid, status = os.wait()
        children.discard(pid)
        failed = status != 0
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.exit(int(failed))
