# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

import vllm_specplug.bench.server as server_module
from vllm_specplug.bench.server import ServerError, ServerSpec, VllmServer

# Answers /health and /metrics as `vllm serve --port N` does, half a second after its start.
FAKE_SERVER = """
import http.server, sys, time
print("(APIServer pid=1) INFO 01-01 00:00:00 [core.py:1] Loading weights took 1 second", flush=True)
time.sleep(0.5)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"some_metric 1.0" if self.path == "/metrics" else b"")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
BROKEN_SERVER = "import sys; print('ValueError: tree_width=0 is not usable'); sys.exit(3)"


def fake(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(server_module, "vllm_program", lambda: [sys.executable, "-c", script])


def test_servers_listen_on_this_machine_only() -> None:
    arguments = ServerSpec("plain", "model").arguments(1234)
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"


def test_waits_for_health_and_reports_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, FAKE_SERVER)
    seen: list[str] = []
    with VllmServer(ServerSpec("plain", "model"), tmp_path / "server.log") as server:
        seconds = server.wait_healthy(timeout_s=30, progress=seen.append)
        assert server.metrics_text() == "some_metric 1.0"
    assert 0.4 < seconds < 30
    assert any("Loading weights took 1 second" in message for message in seen)
    assert not server.is_healthy()


def test_a_server_that_exits_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, BROKEN_SERVER)
    with (
        VllmServer(ServerSpec("jetspec", "model"), tmp_path / "server.log") as server,
        pytest.raises(ServerError, match=r"jetspec\) exited with status 3") as failure,
    ):
        server.wait_healthy(timeout_s=30)
    assert "tree_width=0 is not usable" in str(failure.value)
    assert "server.log" in str(failure.value)


def test_a_silent_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "import time; time.sleep(60)")
    with (
        VllmServer(ServerSpec("plain", "model"), tmp_path / "server.log") as server,
        pytest.raises(ServerError, match="did not answer within"),
    ):
        server.wait_healthy(timeout_s=0.5)


def test_the_shown_command_is_the_run_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    spec = ServerSpec("jetspec", "path with space", {"method": "jetspec", "tree_width": 4})
    shown = shlex.split(spec.display(8000))
    assert "VLLM_CPU_KVCACHE_SPACE=3" in shown
    assert shown[shown.index("vllm") + 1 :] == spec.arguments(8000)
    config = shown[shown.index("--speculative-config") + 1]
    assert json.loads(config) == {"method": "jetspec", "tree_width": 4}
