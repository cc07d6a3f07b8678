# SPDX-License-Identifier: Apache-2.0
"""A child process with everything it starts, certain to be gone afterwards."""

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
    """A command run as the leader of its own session, logging to a file.

    A session of its own keeps the terminal's Ctrl-C away from the children: only `stop`
    ends them, in order, and all of them.
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
        """Process id of the leader, which is also the group's id."""
        return self._process.pid

    def returncode(self) -> int | None:
        """Exit status of the leader; None while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = 25) -> str:
        """The last `lines` lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def pause(self) -> None:
        """Stops the group's processes where they are, until `resume`."""
        _signal_group(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused group continue; does nothing to a running one."""
        _signal_group(self.pid, signal.SIGCONT)

    def stop(self, grace_s: float = 8.0) -> None:
        """Ends the whole group: SIGTERM, up to `grace_s` seconds, then SIGKILL.

        An interrupt during the grace time cuts it short; the group still dies.
        """
        try:
            if group_members(self.pid):
                _signal_group(self.pid, signal.SIGTERM)
                self.resume()  # a paused process would not notice
                deadline = time.monotonic() + grace_s
                while time.monotonic() < deadline:
                    self._process.poll()  # reaps the leader
                    if not group_members(self.pid):
                        break
                    time.sleep(0.05)
        finally:
            _signal_group(self.pid, signal.SIGKILL)
            self._process.wait()
            # Killed, not let go: by now the group's id could belong to someone else.
            self._guard.kill()
            self._guard.communicate()


def group_members(pgid: int) -> list[int]:
    """Process ids in group `pgid` that are alive; zombies do not count."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name, in parentheses, may hold anything; fields follow the last one.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[2]) == pgid and fields[0] not in "ZX":
            members.append(int(entry.name))
    return members


def _signal_group(pgid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone already
        os.killpg(pgid, number)


# Outlives its parent by as long as it takes to end the group: reading ends when the parent closes
# the pipe or dies, however it dies. Stays out of the group, which may be paused.
_GUARD_SCRIPT = """
import os, signal, sys, time
pgid = int(sys.argv[1])
sys.stdin.buffer.read()
try:
    os.killpg(pgid, signal.SIGTERM)
    os.killpg(pgid, signal.SIGCONT)
    time.sleep(2)
    os.killpg(pgid, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def _start_guard(pgid: int) -> subprocess.Popen[bytes]:
    """A process that ends the group `pgid` should this one die without doing so."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD_SCRIPT, str(pgid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def raise_on_termination() -> None:
    """Turns SIGTERM and SIGHUP into SystemExit, so that `finally` and `with` clean up."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
