# SPDX-License-Identifier: Apache-2.0
"""What happens to engines and servers while they work: outputs stay, nothing leaks, ends are clean.

The checks run in one process on a small random target. The server runs two data parallel
replicas of it with parsers for reasoning and tool calls, and is killed in the end.
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
from typing import Any

import openai
import pytest

from tests.e2e.tiny import SPECIAL_TOKENS, make_head, make_text_target
from vllm_specplug.bench.process_group import group_members
from vllm_specplug.bench.server import ServerSpec, VllmServer

pytestmark = [pytest.mark.e2e]


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
        enforce_eager=True,
        speculative_config={
            "method": "jetspec",
            "model": str(make_head(folder / "head", vocab)),
            "num_speculative_tokens": 12,
            "tree_budget": 12,
        },
        extra_args=(
            "--data-parallel-size", "2", "--served-model-name", "tiny",
            "--reasoning-parser", "deepseek_r1",
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--structured-outputs-config",
            json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
        ),
    )  # fmt: skip
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
@pytest.mark.parametrize(
    "extra", [{"specplug_tree_budget": 13}, {"specplug_max_draft_context": -1}]
)
def test_a_request_that_cannot_be_is_refused_by_name(
    server: VllmServer, client: openai.OpenAI, extra: dict[str, int]
) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(extra))) as error:
        client.completions.create(
            model="tiny", prompt=[7], max_tokens=4, extra_body={"vllm_xargs": extra}
        )
    assert error.value.status_code == 400
    assert _complete(client, [7])


SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "ok": {"type": "boolean"}},
    "required": ["color", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}


def _with_and_without_drafts(
    server: VllmServer, client: openai.OpenAI, **options: Any
) -> list[Any]:
    """Messages of seeded chats with trees, each compared with the same chat decoded plainly."""

    def chat(seed: int, nodes: int) -> Any:
        done = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "paint"}], temperature=0.8,
            seed=seed, max_tokens=100,
            # A random model ends its reasoning rarely; the parser looks for the token's text.
            logit_bias={str(SPECIAL_TOKENS.index("</think>")): 6.0},
            extra_body={
                "vllm_xargs": {"specplug_tree_budget": nodes},
                "skip_special_tokens": False,
            },
            **options,
        )  # fmt: skip
        message = done.choices[0].message
        for call in message.tool_calls or ():
            call.id = "chance"
        return message

    def drafted() -> float:
        return sum(_metric(server, "specplug:draft_nodes_total").values())

    before = drafted()
    with ThreadPoolExecutor(4) as pool:
        plain = list(pool.map(lambda seed: chat(seed, 0), range(6)))
        assert drafted() == before
        trees = list(pool.map(lambda seed: chat(seed, 12), range(6)))
    assert drafted() > before
    assert [m.model_dump() for m in trees] == [m.model_dump() for m in plain]
    return trees


@pytest.mark.xdist_group("event_server")
def test_tool_calls_are_those_of_plain_decoding(server: VllmServer, client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "paint"}}
    messages = _with_and_without_drafts(server, client, tools=[TOOL], tool_choice=choice)
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    assert calls and {call.name for call in calls} == {"paint"}, messages
    texts = [call.arguments.removesuffix("</s>") for call in calls]
    complete = [json.loads(text) for text in texts if text.endswith("}")]
    assert complete and all(set(value) == {"color", "ok"} for value in complete)


@pytest.mark.xdist_group("event_server")
def test_reasoning_and_answer_are_those_of_plain_decoding(
    server: VllmServer, client: openai.OpenAI
) -> None:
    answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    messages = _with_and_without_drafts(server, client, response_format=answer_format)
    answered = [message for message in messages if message.content]
    assert answered and any(message.reasoning for message in messages), messages
    assert all(message.content.lstrip().startswith("{") for message in answered)
    texts = [message.content.removesuffix("</s>") for message in answered]
    complete = [json.loads(text) for text in texts if text.endswith("}")]
    assert complete and all(set(value) == {"color", "ok"} for value in complete)


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
