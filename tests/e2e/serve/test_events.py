# SPDX-License-Identifier: Apache-2.0
"""What happens to engines and servers while they work: outputs stay, nothing leaks, ends are clean.

The checks run in one process on a small random target. The server runs two data parallel
replicas of it with parsers for reasoning and tool calls, and is killed in the end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.served import MARK, Server
from tests.e2e.tiny import SPECIAL_TOKENS, make_head, make_text_target
from vllm_specplug.bench.server import free_port

pytestmark = [pytest.mark.e2e, MARK]

PROMPTS = [[7, 40, 41], [60, 61, 62, 63], [100, 9], [270, 280, 290, 11, 12], [8], [9], [33, 34]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("events")
    target = make_text_target(folder / "target")
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    options = {
        "method": "jetspec",
        "model": str(make_head(folder / "head", vocab)),
        "num_speculative_tokens": 12,
        "tree_budget": 12,
    }
    port = free_port()
    arguments = [
        str(target), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16",
        "--data-parallel-size", "2", "--served-model-name", "tiny",
        "--reasoning-parser", "deepseek_r1",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--structured-outputs-config",
        json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
        "--speculative-config", json.dumps(options),
    ]  # fmt: skip
    with Server([arguments], port, folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)


def _complete(client: openai.OpenAI, prompt: list[int]) -> str:
    done = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=48, temperature=0.0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    return str(done.choices[0].text)


def test_two_replicas_answer_alike_and_count_apart(server: Server, client: openai.OpenAI) -> None:
    alone = [_complete(client, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: _complete(client, prompt), PROMPTS * 2))
    assert together == alone * 2 and all(alone)
    for name in ("specplug:drafts_total", "vllm:spec_decode_num_accepted_tokens_total"):
        values = server.metric(name)
        assert set(values) == {"0", "1"} and all(values.values()), (name, values)


SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "ok": {"type": "boolean"}},
    "required": ["color", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}


def _with_and_without_drafts(server: Server, client: openai.OpenAI, **options: Any) -> list[Any]:
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
        return sum(server.metric("specplug:draft_nodes_total").values())

    before = drafted()
    with ThreadPoolExecutor(4) as pool:
        plain = list(pool.map(lambda seed: chat(seed, 0), range(6)))
        assert drafted() == before
        trees = list(pool.map(lambda seed: chat(seed, 12), range(6)))
    assert drafted() > before
    assert [m.model_dump() for m in trees] == [m.model_dump() for m in plain]
    return trees


def test_tool_calls_are_those_of_plain_decoding(server: Server, client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "paint"}}
    messages = _with_and_without_drafts(server, client, tools=[TOOL], tool_choice=choice)
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    assert calls and {call.name for call in calls} == {"paint"}, messages
    texts = [call.arguments.removesuffix("</s>") for call in calls]
    complete = [json.loads(text) for text in texts if text.endswith("}")]
    assert complete and all(set(value) == {"color", "ok"} for value in complete)


def test_reasoning_and_answer_are_those_of_plain_decoding(
    server: Server, client: openai.OpenAI
) -> None:
    answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    messages = _with_and_without_drafts(server, client, response_format=answer_format)
    answered = [message for message in messages if message.content]
    assert answered and any(message.reasoning for message in messages), messages
    assert all(message.content.lstrip().startswith("{") for message in answered)
    texts = [message.content.removesuffix("</s>") for message in answered]
    complete = [json.loads(text) for text in texts if text.endswith("}")]
    assert complete and all(set(value) == {"color", "ok"} for value in complete)


def test_a_client_that_leaves_frees_its_request(server: Server, client: openai.OpenAI) -> None:
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
    while sum(server.metric("vllm:num_requests_running").values()):
        assert time.monotonic() < deadline, "requests of clients that left still run"
        time.sleep(0.2)
    assert sum(server.metric("vllm:num_requests_waiting").values()) == 0
    assert _complete(client, PROMPTS[0]) == _complete(client, PROMPTS[0])


def test_an_engine_that_dies_ends_the_server(server: Server, client: openai.OpenAI) -> None:
    """Last: nothing answers afterwards."""
    engines = [
        pid
        for pid in server.processes()
        if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    ]
    assert engines, [Path(f"/proc/{p}/cmdline").read_text() for p in server.processes()]
    os.kill(engines[0], signal.SIGKILL)
    assert server.ends(), server.log.read_text()[-6000:]
    log = server.log.read_text(errors="replace")
    assert re.search(r"died|dead|EngineDeadError", log), log[-3000:]
    deadline = time.monotonic() + 30
    while server.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not server.processes(), "processes are left"
