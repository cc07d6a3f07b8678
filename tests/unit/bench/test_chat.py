# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_specplug.bench.chat import ChatAnswer, LoadResult, run_chats
from vllm_specplug.bench.near_ties import partings

openai = pytest.importorskip("openai")


class Streamer(BaseHTTPRequestHandler):
    """Streams the prompt's words back as a chat completion, and counts who is inside."""

    inside = 0
    most_inside = 0
    # Streams begin once this many are inside.
    expected = 1
    all_inside = threading.Event()
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0.0
        if self.path == "/v1/completions":
            self._send_scores(body)
            return
        assert body["stream"] and body["return_token_ids"]
        if body["messages"][0]["content"] == "refuse":
            self.send_response(400)
            self.end_headers()
            return
        with self.lock:
            Streamer.inside += 1
            Streamer.most_inside = max(Streamer.most_inside, Streamer.inside)
            if Streamer.inside == Streamer.expected:
                Streamer.all_inside.set()
        Streamer.all_inside.wait(timeout=20)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        words = body["messages"][0]["content"].split()
        self._send({"choices": [{"index": 0, "delta": {}}], "prompt_token_ids": [7, 8]})
        for word in words:
            choice = {"index": 0, "delta": {"content": word + " "}, "token_ids": [len(word)]}
            self._send({"choices": [choice]})
            threading.Event().wait(0.02)
        usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 9}
        self._send({"choices": [], "usage": usage})
        # Before the client can know that it is served, and ask for the next.
        with self.lock:
            Streamer.inside -= 1
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_scores(self, body: dict[str, Any]) -> None:
        """Token 2 leads, token 3 follows at a distance of as many tenths as there are tokens."""
        assert body["max_tokens"] == 1 and body["return_tokens_as_token_ids"]
        scores = {"token_id:2": -1.0, "token_id:3": -1.0 - len(body["prompt"]) / 10}
        scores["token_id:9"] = -8.0
        choice = {
            "index": 0, "text": "", "finish_reason": "length",
            "logprobs": {"top_logprobs": [scores], "tokens": [], "token_logprobs": [],
                         "text_offset": []},
        }  # fmt: skip
        answer = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({**answer, "choices": [choice]}).encode())

    def _send(self, event: dict[str, Any]) -> None:
        base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        self.wfile.write(b"data: " + json.dumps({**base, **event}).encode() + b"\n\n")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def base_url() -> Iterator[str]:
    Streamer.inside = Streamer.most_inside = 0
    Streamer.expected, Streamer.all_inside = 1, threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streamer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_streams_times_and_keeps_the_order(base_url: str, concurrency: int) -> None:
    Streamer.expected = concurrency
    prompts = ["one two three four", "five six", "seven eight nine", "ten"]
    result = run_chats(base_url, "m", prompts, concurrency=concurrency, max_tokens=9)
    assert [answer.text.strip() for answer in result.answers] == prompts
    assert [answer.num_tokens for answer in result.answers] == [4, 2, 3, 1]
    assert Streamer.most_inside == concurrency
    first = result.answers[0]
    assert first.prompt_ids == (7, 8) and first.token_ids == (3, 3, 5, 4)
    assert 0 < first.ttft_s < first.total_s <= result.wall_s
    assert first.tpot_s == pytest.approx((first.total_s - first.ttft_s) / 3)
    assert result.answers[3].tpot_s is None
    assert result.tokens_per_s == pytest.approx(10 / result.wall_s)


def test_a_refused_request_raises(base_url: str) -> None:
    with pytest.raises(openai.OpenAIError):
        run_chats(base_url, "m", ["refuse"], concurrency=1, max_tokens=9)


def test_join_adds_up() -> None:
    a = LoadResult((ChatAnswer("x", 10, 0.1, 1.0),), 1.0)
    b = LoadResult((ChatAnswer("y", 20, 0.3, 2.0), ChatAnswer("z", 1, 0.2, 0.2)), 2.0)
    joined = LoadResult.join([a, b])
    assert [answer.text for answer in joined.answers] == ["x", "y", "z"]
    assert joined.tokens_per_s == pytest.approx(31 / 3)
    assert joined.median_ttft_ms == pytest.approx(200)
    assert joined.median_tpot_ms == pytest.approx(1e3 * (0.9 / 9 + 1.7 / 19) / 2)


def test_partings_are_scored_by_the_server(base_url: str) -> None:
    def pair(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[ChatAnswer, ChatAnswer]:
        a, b = (ChatAnswer("", 3, 0.1, 0.2, (1,) * 3, ids) for ids in (one, other))
        return a, b

    near, far = pair((5, 2), (5, 3)), pair((6,) * 3 + (2,), (6,) * 3 + (3,))
    unlisted = pair((2,), (77,))
    alike = [pair((5, 2), (5, 2)), pair((5, 2), (5,))]
    found = partings(base_url, "m", [*alike, near, far, unlisted])
    assert [p.position for p in found] == [1, 3, 0]
    assert [p.gap_nats for p in found] == pytest.approx([0.4, 0.6, 7.0])
    assert [p.is_near_tie for p in found] == [True, False, False]
