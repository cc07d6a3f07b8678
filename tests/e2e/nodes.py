# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` commands that make one server, each as a node of its own would run it.

The nodes share this machine and meet over TCP on the loopback interface. vLLM gives each node its
own name of shared memory, so tensor parallel collectives between nodes go over TCP, too.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.e2e.fork_server import run_forked
from vllm_specplug.bench.process_group import group_members

_TIME_LIMIT_S = 240.0
# Time that the first node has to notice that another one ended.
_PATIENCE_S = 40.0
# Message queues of vLLM.
_SHARED = re.compile(r"/dev/shm/psm_\w+")
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_HOST_IP": "127.0.0.1"}
_COUNTERS = {
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True)
class Served:
    """What the nodes answered."""

    token_ids: list[list[int]]
    drafted: dict[str, float]
    """Nodes of trees, by engine."""
    accepted: dict[str, float]
    ended: bool
    """Whether the first node ended after the last one was killed."""


def serve_nodes(
    nodes: Sequence[Sequence[str]], port: int, requests: list[dict[str, Any]], folder: Path,
    *sabotages: str, is_plain: bool = False, kill_last: bool = False,
) -> Served:  # fmt: skip
    """Answers `requests` by the nodes' arguments of `vllm serve`; the first one listens on `port`.

    Raises:
        AssertionError: with the end of the log when a node fails.
    """
    job, result, log = (folder / f"nodes.{kind}" for kind in ("job", "json", "log"))
    made = {"nodes": nodes, "port": port, "requests": requests, "sabotage": sabotages,
            "is_plain": is_plain, "kill_last": kill_last}  # fmt: skip
    job.write_text(json.dumps(made))
    status = run_forked("tests.e2e.nodes", [str(job), str(result)], log, env=_ENVIRONMENT)
    if status:
        raise AssertionError(f"nodes ended with {status}:\n{log.read_text()[-6000:]}")
    return Served(**json.loads(result.read_text()))


def _run_node(arguments: list[str], job: dict[str, Any]) -> None:
    os.setsid()
    if job["is_plain"]:
        from vllm_specplug.vllm_v2.plain_engine import use_v2

        use_v2()
    from tests.e2e.engine_process import fork_workers
    from tests.e2e.sabotage import sabotage

    for name in job["sabotage"]:
        sabotage(name)
    fork_workers()
    from vllm.entrypoints.cli.main import main as vllm_command

    sys.argv = ["vllm", "serve", *arguments]
    vllm_command()


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    fork = multiprocessing.get_context("fork")
    nodes: list[BaseProcess] = [
        fork.Process(target=_run_node, args=(arguments, job)) for arguments in job["nodes"]
    ]
    for node in nodes:
        node.start()
    shared: set[str] = set()
    try:
        url = f"http://127.0.0.1:{job['port']}"
        answers = _ask(url, job, nodes)
        shared = _shared_memory(nodes)
        if job["kill_last"]:
            _kill(nodes[-1:])
            _wait_for_end(url, job, nodes[0])
        answers["ended"] = not nodes[0].is_alive()
        Path(result_path).write_text(json.dumps(answers))
    finally:
        _kill(nodes)
        for name in shared:
            Path(name).unlink(missing_ok=True)


def _kill(nodes: list[BaseProcess]) -> None:
    """Ends nodes as a power cut does."""
    for node in nodes:
        for pid in group_members(node.pid or 0):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.join()


def _shared_memory(nodes: list[BaseProcess]) -> set[str]:
    """Files that remain if the nodes are killed."""
    members = [pid for node in nodes for pid in group_members(node.pid or 0)]
    return {name for pid in members for name in _SHARED.findall(_maps(pid))}


def _maps(pid: int) -> str:
    with suppress(OSError):  # it ended
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


def _ask(url: str, job: dict[str, Any], nodes: list[BaseProcess]) -> dict[str, Any]:
    deadline = time.monotonic() + _TIME_LIMIT_S
    while not _is_healthy(url):
        assert all(node.is_alive() for node in nodes), [node.exitcode for node in nodes]
        assert time.monotonic() < deadline, "no node answers"
        time.sleep(0.1)

    with ThreadPoolExecutor(4) as pool:
        token_ids = list(pool.map(partial(_complete, url), job["requests"]))
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        metrics = page.read().decode()
    counters = {name: _by_engine(metrics, counter) for name, counter in _COUNTERS.items()}
    return {"token_ids": token_ids, **counters}


def _wait_for_end(url: str, job: dict[str, Any], node: BaseProcess) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while node.is_alive() and time.monotonic() < deadline:
        # A request makes the engine notice.
        with suppress(OSError):
            _complete(url, job["requests"][0], timeout_s=10)
        time.sleep(0.5)


def _complete(url: str, request: dict[str, Any], timeout_s: float = 60) -> list[int]:
    """The tokens of an answer."""
    body = {"return_token_ids": True, **request}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def _by_engine(metrics: str, name: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith(name + "{"):
            engine = line.partition('engine="')[2].partition('"')[0]
            values[engine] = values.get(engine, 0.0) + float(line.rpartition(" ")[2])
    return values
