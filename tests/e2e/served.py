# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` in forks of a test's process, which has imported vLLM; one fork for each node.

For tests in a process of their own (see own_process.py), which get their variables by `MARK`. The
nodes of a server share this machine and meet over TCP on the loopback interface. vLLM gives each
node its own name of shared memory, so tensor parallel collectives between nodes go over TCP, too.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fork_server import FORKS_HERE
from vllm_specplug.bench.process_group import group_members

MARK = pytest.mark.own_process(
    env={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        FORKS_HERE: "1",
    }
)
_TIME_LIMIT_S = 240.0
# What `vllm serve` imports: here once, before the forks.
_COMMANDS = (
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
)
# Message queues of vLLM.
_SHARED = re.compile(r"/dev/shm/psm_\w+")


class Server:
    """A server as a context manager; entering waits until it answers.

    Args:
        nodes: arguments of each node's `vllm serve`; the first one listens on `port`.
        folder: for the log of all nodes.
        sabotage: names of `tests.e2e.sabotage`.
    """

    def __init__(
        self, nodes: Sequence[Sequence[str]], port: int, folder: Path, *sabotage: str
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        fork = multiprocessing.get_context("fork")
        self._nodes: list[BaseProcess] = [
            fork.Process(target=_run_node, args=(arguments, self.log, sabotage))
            for arguments in nodes
        ]

    def __enter__(self) -> Server:
        for name in _COMMANDS:
            importlib.import_module(name)
        for node in self._nodes:
            node.start()
        deadline = time.monotonic() + _TIME_LIMIT_S
        try:
            while not self._is_healthy():
                alive = all(node.is_alive() for node in self._nodes)
                assert alive and time.monotonic() < deadline, self.log.read_text()[-6000:]
                time.sleep(0.1)
        except BaseException:
            self._stop(self._nodes)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop(self._nodes)

    def _stop(self, nodes: list[BaseProcess]) -> None:
        shared = {name for pid in self.processes() for name in _SHARED.findall(_maps(pid))}
        _kill(nodes)
        for name in shared:
            Path(name).unlink(missing_ok=True)

    def processes(self) -> list[int]:
        """Ids of all processes of all nodes."""
        return [pid for node in self._nodes for pid in group_members(node.pid or 0)]

    def kill_last_node(self) -> None:
        _kill(self._nodes[-1:])

    def ends(self, patience_s: float = 60.0) -> bool:
        """Whether the first node ends; requests make it notice that an engine is gone."""
        deadline = time.monotonic() + patience_s
        while self._nodes[0].is_alive() and time.monotonic() < deadline:
            with suppress(OSError):
                self.complete({"prompt": [7], "max_tokens": 4}, timeout_s=10)
            time.sleep(0.5)
        return not self._nodes[0].is_alive()

    def complete(self, request: dict[str, Any], timeout_s: float = 60) -> list[int]:
        """Returns the tokens of an answer."""
        asked = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({"return_token_ids": True, **request}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def complete_all(self, requests: list[dict[str, Any]]) -> list[list[int]]:
        """Returns the tokens of each answer; four requests run at once."""
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self.complete, requests))

    def metric(self, name: str) -> dict[str, float]:
        """Returns the values of a counter by engine."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as page:
            metrics = page.read().decode()
        values: dict[str, float] = {}
        for line in metrics.splitlines():
            engine = re.search(r'engine="(\d+)"', line)
            if line.startswith(name + "{") and engine:
                values[engine[1]] = values.get(engine[1], 0.0) + float(line.rpartition(" ")[2])
        return values

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False


def _run_node(arguments: Sequence[str], log: Path, names: Sequence[str]) -> None:
    os.setsid()
    with log.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from tests.e2e.engine_process import fork_workers
    from tests.e2e.sabotage import sabotage

    for name in names:
        sabotage(name)
    fork_workers()
    from vllm.entrypoints.cli.main import main as vllm_command

    sys.argv = ["vllm", "serve", *arguments]
    vllm_command()


def _kill(nodes: list[BaseProcess]) -> None:
    """Ends nodes as a power cut does."""
    for node in nodes:
        for pid in group_members(node.pid or 0):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.join()


def _maps(pid: int) -> str:
    with suppress(OSError):  # it ended
        return Path(f"/proc/{pid}/maps").read_text()
    return ""
