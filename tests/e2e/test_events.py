# SPDX-License-Identifier: Apache-2.0
"""What happens to engines and servers while they work: outputs stay, nothing leaks, ends are clean.

The checks run in one process on a small random target. The server runs two data parallel
replicas of it, and is killed in the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.e2e import event_checks
from tests.e2e.pair import assert_check, check_names
from tests.e2e.tiny import make_head, make_text_target
from vllm_specplug.bench.process_group import group_members
from vllm_specplug.bench.server import ServerSpec, VllmServer

pytestmark = [pytest.mark.e2e]


@pytest.mark.xdist_group("event_checks")
@pytest.mark.parametrize("name", check_names(event_checks))
def test_engine_events(name: str) -> None:
    assert_check("tests.e2e.event_checks", name)


PROMPTS = [[7, 40, 41], [60, 61, 62, 63], [100, 9], [270, 280, 290, 11, 12], [8], [9], [33, 34]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("events")
    target = make_text_target(folder / "target")
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    spec = ServerSpec(
        name="two replicas",
        model=str(target),
        max_model_len=256,
        dtype="float32",
        speculative_config={
            "method": "jetspec",
            "model": str(make_head(folder / "head", vocab)),
            "num_speculative_tokens": 12,
            "tree_budget": 12,
        },
        extra_args=("--data-parallel-size", "2", "--served-model-name", "tiny"),
    )
    with VllmServer(spec, folder / "server.log") as running:
        running.wait_healthy()
        yield running


@pytest.fixture(scope="module")
def client(server: VllmServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=120)


def _complete(client: openai.OpenAI, prompt: list[int]) -> str:
    done = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=48, temperature=0.0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    return str(done.choices[0].text)


def _metric(server: VllmServer, name: str) -> dict[str, float]:
    """Values of one metric by engine."""
    text = urllib.request.urlopen(f"{server.base_url}/metrics", timeout=60).read().decode()
    values: dict[str, float] = {}
    for line in text.splitlines():
        engine = re.search(r'engine="(\d+)"', line)
        if line.startswith(name + "{") and engine:
            values[engine[1]] = values.get(engine[1], 0.0) + float(line.rsplit(" ", 1)[1])
    return values


@pytest.mark.xdist_group("event_server")
def test_two_replicas_answer_alike_and_count_apart(
    server: VllmServer, client: openai.OpenAI
) -> None:
    alone = [_complete(client, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: _complete(client, prompt), PROMPTS * 2))
    assert together == alone * 2 and all(alone)
    for name in ("specplug:drafts_total", "vllm:spec_decode_num_accepted_tokens_total"):
        values = _metric(server, name)
        assert set(values) == {"0", "1"} and all(values.values()), (name, values)


@pytest.mark.xdist_group("event_server")
def test_a_client_that_leaves_frees_its_request(server: VllmServer, client: openai.OpenAI) -> None:
    streams = [
        client.completions.create(
            model="tiny", prompt=prompt, max_tokens=240, stream=True, temperature=0.7,
            extra_body={"ignore_eos": True},
        )
        for prompt in PROMPTS
    ]  # fmt: skip
    for stream in streams:
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 60
    while sum(_metric(server, "vllm:num_requests_running").values()):
        assert time.monotonic() < deadline, "requests of clients that left still run"
        time.sleep(0.2)
    assert sum(_metric(server, "vllm:num_requests_waiting").values()) == 0
    assert _complete(client, PROMPTS[0]) == _complete(client, PROMPTS[0])


@pytest.mark.xdist_group("event_server")
def test_an_engine_that_dies_ends_the_server(server: VllmServer, client: openai.OpenAI) -> None:
    """Last: nothing answers afterwards."""
    engines = [
        pid
        for pid in group_members(server.pid)
        if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    ]
    assert engines, [Path(f"/proc/{p}/cmdline").read_text() for p in group_members(server.pid)]
    os.kill(engines[0], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.is_running() and time.monotonic() < deadline:
        # Requests make it notice at once; each gets an error, none hangs.
        with contextlib.suppress(openai.APIError):
            client.with_options(timeout=10, max_retries=0).completions.create(
                model="tiny", prompt=PROMPTS[0], max_tokens=4
            )
        time.sleep(0.5)
    assert not server.is_running(), server.log_tail(40)
    log = server.log_path.read_text(errors="replace")
    assert re.search(r"died|dead|EngineDeadError", log), log[-3000:]
    deadline = time.monotonic() + 30
    while group_members(server.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not group_members(server.pid), "processes are left"
