# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a context manager."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.bench.process_group import ProcessGroup

# Defaults for all servers; the user's settings override them.
DEFAULT_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

_LOG_LINE = re.compile(r"(?:INFO|WARNING) \d\d-\d\d [\d:]+ \[[^\]]*\] (?P<message>.+)")


class ServerError(RuntimeError):
    """A server did not start or died; the message carries the end of its log."""


@dataclass(frozen=True)
class ServerSpec:
    """The settings of a server."""

    name: str
    model: str
    speculative_config: dict[str, Any] | None = None
    max_model_len: int = 2048
    max_num_seqs: int = 16
    dtype: str = "bfloat16"
    enforce_eager: bool = False

    def arguments(self, port: int) -> list[str]:
        """Returns the `vllm` command line without its program name."""
        # By default vLLM listens on every interface.
        args = ["serve", self.model, "--host", "127.0.0.1", "--port", str(port)]
        args += ["--dtype", self.dtype]
        args += ["--max-model-len", str(self.max_model_len)]
        args += ["--max-num-seqs", str(self.max_num_seqs)]
        if self.enforce_eager:
            args.append("--enforce-eager")
        if self.speculative_config is not None:
            args += ["--speculative-config", json.dumps(self.speculative_config)]
        return args

    def display(self, port: int) -> str:
        """Returns the command as a user types it, with its environment."""
        env = [f"{key}={os.environ.get(key, value)}" for key, value in DEFAULT_ENV.items()]
        return shlex.join([*env, "vllm", *self.arguments(port)])


def vllm_program() -> list[str]:
    """Returns the command of vLLM's command line with this interpreter."""
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def free_port() -> int:
    """Returns a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """One `vllm serve` as a context manager. Entering starts it without waiting."""

    def __init__(self, spec: ServerSpec, log_path: Path) -> None:
        self.spec = spec
        self.port = free_port()
        self.log_path = log_path
        self._group: ProcessGroup | None = None

    @property
    def base_url(self) -> str:
        """Root of the server's HTTP interface."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server's leader."""
        assert self._group is not None, "the server was not started"
        return self._group.pid

    def log_tail(self, lines: int = 12) -> str:
        """Returns the last lines of the server's log."""
        return "" if self._group is None else self._group.log_tail(lines)

    def __enter__(self) -> VllmServer:
        command = [*vllm_program(), *self.spec.arguments(self.port)]
        self._group = ProcessGroup(command, self.log_path, {**DEFAULT_ENV, **os.environ})
        return self

    def __exit__(self, *exc: object) -> None:
        if self._group is not None:
            self._group.stop()

    def wait_healthy(
        self, timeout_s: float = 600.0, progress: Callable[[str], None] = lambda message: None
    ) -> float:
        """Waits until the server answers; returns the seconds it took.

        Args:
            timeout_s: limit of the waiting time.
            progress: called regularly with the server's latest log message.

        Raises:
            ServerError: if it exits or does not answer in time.
        """
        assert self._group is not None, "enter the server before waiting for it"
        start = time.monotonic()
        while not self.is_healthy():
            code = self._group.returncode()
            waited = time.monotonic() - start
            if code is not None or waited > timeout_s:
                what = (
                    f"exited with status {code}"
                    if code is not None
                    else f"did not answer within {timeout_s:.0f} s"
                )
                raise ServerError(
                    f"vllm serve ({self.spec.name}) {what}. The end of its log:\n"
                    f"{self._group.log_tail()}\n"
                    f"Full log: {self.log_path}. `specplug doctor` checks the installation."
                )
            progress(f"{waited:.0f} s: {self.last_message()}")
            time.sleep(0.25)
        return time.monotonic() - start

    def is_healthy(self) -> bool:
        """Whether the server answers its health check."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def last_message(self) -> str:
        """Returns the latest message in the server's log, without its prefix."""
        assert self._group is not None
        for line in reversed(self._group.log_tail(40).splitlines()):
            match = _LOG_LINE.search(line)
            if match:
                return match["message"].strip()[:70]
        return "starting Python"

    def metrics_text(self) -> str:
        """Returns the server's Prometheus page."""
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=30) as response:
            return str(response.read().decode())
