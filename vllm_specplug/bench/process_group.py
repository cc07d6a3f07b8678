# SPDX-License-Identifier: Apache-2.0
"""A child process and its descendants, which always end with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType


class ProcessGroup:
    """A command in its own session, with its output in a file.

    In its own session it does not receive the terminal's Ctrl-C, and `stop` ends all its processes.
    """

    def __init__(
        self, command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
    ) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.command = list(command)
        self.log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        self._guard = _start_guard(self.pid)

    @property
    def pid(self) -> int:
        """Process id of the leader, which is the group's id."""
        return self._process.pid

    def returncode(self) -> int | None:
        """Returns the exit status of the leader; None while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = 25) -> str:
        """Returns the last `lines` lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, grace_s: float = 8.0) -> None:
        """Ends the group: SIGTERM, up to `grace_s` seconds, then SIGKILL.

        An interrupt ends the grace time, and the group is killed.
        """
        try:
            if group_members(self.pid):
                _signal_group(self.pid, signal.SIGTERM)
                deadline = time.monotonic() + grace_s
                while time.monotonic() < deadline:
                    self._process.poll()  # reaps the leader
                    if not group_members(self.pid):
                        break
                    time.sleep(0.05)
        finally:
            _signal_group(self.pid, signal.SIGKILL)
            self._process.wait()
            # A guard that continued could signal a new group with the same id.
            self._guard.kill()
            self._guard.communicate()


def group_members(pgid: int) -> list[int]:
    """Returns the process ids in group `pgid` without zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name in parentheses may have any characters; fields follow it.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        if int(fields[2]) == pgid and fields[0] not in "ZX":
            members.append(int(entry.name))
    return members


def _signal_group(pgid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(pgid, number)


# Ends the group when the parent dies, because the read then returns.
_GUARD_SCRIPT = """
import os, signal, sys, time
pgid = int(sys.argv[1])
sys.stdin.buffer.read()
try:
    os.killpg(pgid, signal.SIGTERM)
    time.sleep(2)
    os.killpg(pgid, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def _start_guard(pgid: int) -> subprocess.Popen[bytes]:
    """Starts a process that ends the group `pgid` if this process dies first."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD_SCRIPT, str(pgid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def raise_on_termination() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that `finally` and `with` clean up."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
