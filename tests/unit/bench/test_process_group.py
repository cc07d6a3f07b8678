# SPDX-License-Identifier: Apache-2.0
"""No process survives its group, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_specplug.bench.process_group import ProcessGroup, group_members

# A leader with a child of its own; `stubborn` has both ignore SIGTERM.
FAMILY = """
import os, signal, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("family is up", flush=True)
time.sleep(60)
"""

# Starts a family as `specplug demo` starts servers, and waits inside the `with`.
STARTER = """
import sys, time
from pathlib import Path
from vllm_specplug.bench.process_group import raise_on_termination
from vllm_specplug.bench.server import ServerSpec, VllmServer
import vllm_specplug.bench.server as server_module

server_module.vllm_program = lambda: [sys.executable, "-c", sys.argv[2], "plain"]
raise_on_termination()
with VllmServer(ServerSpec("plain", "model"), Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    if sys.argv[3] == "fail":
        raise RuntimeError("as a failing request would")
    time.sleep(60)
"""


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def start_family(tmp_path: Path, temper: str) -> ProcessGroup:
    group = ProcessGroup([sys.executable, "-c", FAMILY, temper], tmp_path / "family.log")
    wait_until(lambda: "up" in group.log_tail() and len(group_members(group.pid)) == 2)
    return group


@pytest.mark.parametrize("temper", ["meek", "stubborn"])
def test_stop_ends_the_whole_group(tmp_path: Path, temper: str) -> None:
    group = start_family(tmp_path, temper)
    group.stop(grace_s=0.5)
    assert group_members(group.pid) == []
    assert group.returncode() is not None


def test_stop_reaches_children_of_a_dead_leader(tmp_path: Path) -> None:
    group = start_family(tmp_path, "meek")
    os.kill(group.pid, signal.SIGKILL)
    wait_until(lambda: group.returncode() is not None)
    assert len(group_members(group.pid)) == 1
    group.stop(grace_s=0.5)
    assert group_members(group.pid) == []


def test_stop_is_finished_by_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = start_family(tmp_path, "stubborn")

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vllm_specplug.bench.process_group.time.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.stop(grace_s=30.0)
    wait_until(lambda: group_members(group.pid) == [])


@pytest.mark.parametrize(
    ("how", "status"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129), ("fail", 1)],
)
def test_no_server_is_left_behind(tmp_path: Path, how: signal.Signals | str, status: int) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", STARTER, str(log), FAMILY, "fail" if how == "fail" else ""]
    starter = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert starter.stdout is not None
    pgid = int(starter.stdout.readline())
    if isinstance(how, signal.Signals):
        wait_until(lambda: len(group_members(pgid)) == 2)
        starter.send_signal(how)
    assert starter.wait(timeout=60) == status
    assert group_members(pgid) == []


def test_a_killed_starter_takes_its_servers_along(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "server.log"), FAMILY, ""]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pgid = int(starter.stdout.readline())
    wait_until(lambda: len(group_members(pgid)) == 2)
    starter.kill()
    starter.wait()
    wait_until(lambda: group_members(pgid) == [])
