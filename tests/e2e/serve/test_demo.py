# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it: real servers, real requests, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_specplug.targets import prepare_target

# One worker: servers of two workers would ask for the same ports and logs.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.xdist_group("demo")]

SPECPLUG = [sys.executable, "-m", "vllm_specplug.cli"]


def servers_with(marker: str) -> list[str]:
    """Command lines of live processes whose environment or arguments carry `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            environ = (entry / "environ").read_bytes()
            if state not in "ZX" and marker.encode() in environ:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose processes can be told from all others, sharing the real target."""
    target = prepare_target("smollm2")
    (tmp_path / target.name).symlink_to(target)
    return {**os.environ, "SPECPLUG_CACHE": str(tmp_path), "COLUMNS": "100"}


def test_demo_compares_trees_with_plain_vllm(environment: dict[str, str], tmp_path: Path) -> None:
    command = [*SPECPLUG, "demo", "--quick", "--dtype", "float32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("│")
    ]
    assert [row[:2] for row in rows] == [
        ["1 at a time", "plain"],
        ["1 at a time", "jetspec"],
        ["4 at a time", "plain"],
        ["4 at a time", "jetspec"],
    ]
    for row in rows:
        assert float(row[2]) > 0 and float(row[5]) > 0 and float(row[6]) > 0
    assert rows[0][4] == "-"
    assert float(rows[1][4]) > 1.0, "no draft was accepted"
    assert "identical answers, one at a time: 4 of 4" in done.stdout
    assert "NOT LOSSLESS" not in done.stdout
    commands = re.findall(r"vllm serve .*", done.stdout)
    assert any("--speculative-config" in line and '"jetspec"' in line for line in commands)
    assert servers_with(str(tmp_path)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_server(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    command = [*SPECPLUG, "demo", "--method", "none", "--quick"]
    demo = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    log = tmp_path / "logs" / "demo-plain.log"
    deadline = time.monotonic() + 300
    # Wait until the engine core and its worker exist: these are what a careless stop leaves.
    while not (log.is_file() and "Worker" in log.read_text(errors="replace")):
        assert demo.poll() is None and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.2)
    assert len(servers_with(str(tmp_path))) > 2
    demo.send_signal(number)
    assert demo.wait(timeout=60) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert servers_with(str(tmp_path)) == []


def test_a_server_that_cannot_start_is_explained(
    environment: dict[str, str], tmp_path: Path
) -> None:
    command = [*SPECPLUG, "demo", "--head", str(tmp_path), "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert "vllm serve (jetspec) exited with status" in done.stderr
    assert f"{str(tmp_path)!r} has no config.json" in done.stderr
    assert "Full log:" in done.stderr
