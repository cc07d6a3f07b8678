# SPDX-License-Identifier: Apache-2.0
"""Acceptance is the difference of a server's counters over the answers to one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

import vllm_specplug.bench.cli as cli
from vllm_specplug.bench import evaluate
from vllm_specplug.bench.evaluate import data_files, measure, read_questions, set_name
from vllm_specplug.bench.server import ServerSpec, VllmServer
from vllm_specplug.rows import LeftOut

ROWS: dict[str, list[Any]] = {
    "mt_bench": [{"question_id": 81, "turns": ["one", "two"]}],
    "gsm8k": [{"question": "2 + 2?", "answer": "4"}, {"wrong": 1}, {"question": "too long"}],
    "books": [{"text": "once upon"}],
}


class Server(ThreadingHTTPServer):
    """Of a draft of n nodes, it accepts one token less than the digits of n, to depth 1."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.accepted = 0
        self.is_dead = False
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        accepted, lines = self.server.accepted, ""
        for name, labels, value in (
            ("drafts", "", len(self.server.asked)), ("draft_tokens", "", 0),
            ("accepted_tokens", "", accepted),
            ("accepted_tokens_per_pos", '{position="0"}', accepted),
        ):  # fmt: skip
            name = f"vllm:spec_decode_num_{name}_total"
            lines += f"# TYPE {name} counter\n{name}{labels} {value}\n"
        self._answer(lines.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "too long" in json.dumps(body):
            self._answer(b'{"error": {"message": "a long prompt"}}', 400)
            return
        if "deadly" in json.dumps(body):
            self.server.is_dead = True
        if self.server.is_dead:
            self.close_connection = True
            return
        self.server.asked.append(body)
        self.server.accepted += len(str(body["vllm_xargs"]["specplug_tree_budget"])) - 1
        said = {"role": "assistant", "content": f"answer {len(self.server.asked)}"}
        choice = {"index": 0, "message": said, "text": "x", "finish_reason": "stop"}
        reply = {"id": "1", "object": "x", "created": 1, "model": "m", "choices": [choice]}
        self._answer(json.dumps(reply).encode())

    def _answer(self, content: bytes, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


class Running(VllmServer):
    """The running `Server` in place of a vLLM server."""

    base_url = ""

    def __enter__(self) -> VllmServer:
        return self

    def wait_healthy(self, *_: Any, **__: Any) -> float:
        return 0.0

    def log_tail(self, lines: int = 12) -> str:
        return "out of memory"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(evaluate, "_SETTLED_S", 0.01)
    made = Server()
    Thread(target=made.serve_forever, daemon=True).start()
    monkeypatch.setattr(Running, "base_url", f"http://127.0.0.1:{made.server_port}")
    yield made
    made.shutdown()


def test_cells_by_data_and_tree_size(server: Server, tmp_path: Path) -> None:
    left_out = LeftOut()
    sets = sets_of(tmp_path, left_out, **ROWS)
    running = Running(ServerSpec("x", "m"), tmp_path / "log")
    done: list[int] = []
    cells = list(measure(
        running, sets, [8, 16], concurrency=1, sampling={"max_tokens": 5, "temperature": 0.0},
        left_out=left_out, on_answer=lambda: done.append(1),
    ))  # fmt: skip
    found = [(*[*cell.values()][:4], cell["accepted_to_depth"]) for cell in cells]
    assert found == [
        ("mt_bench", 8, 2, 2.0, []), ("mt_bench", 16, 2, 2.0, [1.0]),
        ("gsm8k", 8, 1, 1.0, []), ("gsm8k", 16, 1, 1.0, [1.0]),
        ("books", 8, 1, 1.0, []), ("books", 16, 1, 1.0, [1.0]),
    ]  # fmt: skip
    assert cells[1]["mean_acceptance_length"] == 2.0
    assert len(done) == 8
    places = {what[:24]: [Path(p).name for p in where] for what, where in left_out.places.items()}
    assert places == {
        "none of the fields messa": ["gsm8k.jsonl:2"],
        "the server refuses it (E": ["gsm8k.jsonl:3"],
    }
    # The second turn follows the server's own answer.
    said = [(m["role"], m["content"]) for m in server.asked[1]["messages"]]
    assert said == [("user", "one"), ("assistant", "answer 1"), ("user", "two")]
    assert server.asked[-1]["prompt"] == "once upon"
    assert {body["max_tokens"] for body in server.asked} == {5}


def sets_of(tmp_path: Path, left_out: LeftOut, **files: list[Any]) -> dict[str, Any]:
    """Questions of files with these rows."""
    sets = {}
    for name, rows in files.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sets[name] = read_questions(path, 0, left_out)
    return sets


def test_a_prompt_that_is_refused_again_counts_once(server: Server, tmp_path: Path) -> None:
    left_out = LeftOut()
    sets = sets_of(tmp_path, left_out, a=[{"prompt": "too long"}, {"prompt": "one"}])
    running = Running(ServerSpec("x", "m"), tmp_path / "log")
    for _ in range(2):  # the cell is measured again after an interruption
        (cell,) = measure(running, sets, [8], concurrency=1, sampling={}, left_out=left_out)
        assert cell["answers"] == 1
    assert list(left_out.places.values()) == [[str(tmp_path / "a.jsonl:1")]]
    left_out.add("other", str(tmp_path / "a.jsonl:1"))
    assert len(left_out.places) == 2


def test_a_refused_turn_leaves_the_answers_before_it(server: Server, tmp_path: Path) -> None:
    left_out = LeftOut()
    sets = sets_of(tmp_path, left_out, a=[{"turns": ["one", "too long", "three"]}])
    running = Running(ServerSpec("x", "m"), tmp_path / "log")
    (cell,) = measure(running, sets, [8], concurrency=1, sampling={}, left_out=left_out)
    assert (cell["answers"], cell["drafts"]) == (1, 1.0)
    assert list(left_out.places.values()) == [[str(tmp_path / "a.jsonl:1")]]


def test_an_evaluation_that_a_servers_death_ends_is_continued(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "VllmServer", Running)
    monkeypatch.setattr(cli, "raise_on_termination", lambda: None)
    monkeypatch.setattr(cli, "check_target", lambda model: None)
    sets_of(tmp_path, LeftOut(), first=[{"prompt": "one"}], second=[{"prompt": "deadly"}])
    files = [part for name in ("first", "second")
             for part in ("--data", str(tmp_path / f"{name}.jsonl"))]  # fmt: skip
    out = tmp_path / "out.json"
    command = [*files, "--model", "m", "--head", str(tmp_path), "--sizes", "8", "--out", str(out)]
    command += ["--speculative-config", '{"method": "x", "local_head": "l"}']
    counts = []

    def watched(*args: Any, **options: Any) -> Iterator[Any]:
        for cell in measure(*args, **options):
            yield cell
            # A process that is killed now has written the cell.
            counts.append(len(json.loads(out.read_text())["results"]))

    with monkeypatch.context() as patch:
        patch.setattr(cli, "measure", watched)
        result = CliRunner().invoke(cli.evaluate_app, command)
    assert counts == [1]
    assert result.exit_code == 1, result.output
    assert "did not answer second with 8 nodes: Connection error" in result.output
    assert "out of memory" in result.output
    written = json.loads(out.read_text())
    assert written["speculative_config"] == {
        "method": "x", "local_head": "l", "model": str(tmp_path),
        "num_speculative_tokens": 8,
        "max_request_budget": 8,
    }  # fmt: skip
    result = CliRunner().invoke(cli.evaluate_app, [*command, "--out", str(tmp_path)])
    assert result.exit_code == 1 and "Is a directory" in result.stderr
    (cell,) = written["results"]
    assert (cell["data"], cell["answers"]) == ("first", 1)
    result = CliRunner().invoke(cli.evaluate_app, [*command, "--output-len", "9"])
    assert result.exit_code == 2 and "has results with output_len = 256, not 9" in result.output
    server.is_dead = False
    sets_of(tmp_path, LeftOut(), second=[{"prompt": "two"}, {"wrong": 1}])
    asked = len(server.asked)
    for _ in range(2):  # the second time, nothing is left to do
        result = CliRunner().invoke(cli.evaluate_app, command)
        assert result.exit_code == 0 and "second" in result.output, result.output
        written = json.loads(out.read_text())
        assert [cell["data"] for cell in written["results"]] == ["first", "second"]
        assert written["results"][0] == cell and len(server.asked) == asked + 1
        assert list(written["left_out"].values()) == [[f"{tmp_path / 'second.jsonl'}:2"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompts: point --data at"),
        (["--data", "nowhere"], "nowhere does not exist. Point --data"),
        (["--data", "nowhere", "--head", "/nothing"], "'/nothing' is not usable: there is no such"),
        (["--sizes", "8,0"], "--sizes '8,0', legal: numbers of nodes from 1 on"),
        (["--sizes", ""], "--sizes '', legal"),
        (["--speculative-config", "[8]"], "--speculative-config '[8]', legal: a JSON object"),
        # Fields that other options set.
        *(
            (["--method", "x", "--speculative-config", f'{{"{name}": 8}}'],
             f"{name} = 8, legal: none, because {option} sets it")
            for name, option in (
                ("num_speculative_tokens", "--sizes"), ("tree_budget", "--sizes"),
                ("max_request_budget", "--sizes"), ("model", "--head"), ("method", "--method"),
            )
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_and_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(cli, "raise_on_termination", lambda: None)
    monkeypatch.setattr(cli, "check_target", lambda model: None)
    given = ["--model", "m", "--head", str(tmp_path), *arguments]
    result = CliRunner().invoke(cli.evaluate_app, given)
    assert result.exit_code == 2 and message in result.stderr, result.output


def test_a_limit_takes_the_first_prompts(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"wrong": 1}, *({"question": f"q{i}"} for i in range(5))]))
    left_out = LeftOut()
    questions = read_questions(path, 2, left_out)
    assert [q.messages[0]["content"] for q in questions] == ["q0", "q1"]
    assert [q.place for q in questions] == [f"{path}:2", f"{path}:3"]
    assert list(left_out.places.values()) == [[f"{path}:1"]]


def test_a_folder_stands_for_its_files_without_training_data(tmp_path: Path) -> None:
    for name in ("b", "a_dev", "gsm8k_train_questions"):
        (tmp_path / f"{name}.jsonl").write_text("{}")
    (tmp_path / "README.md").write_text("not data")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match=r"holds no \*\.jsonl file"):
        data_files([other])
    (other / "c.jsonl").write_text("{}")
    assert [set_name(path) for path in data_files([tmp_path, other])] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="two data files are called 'b'"):
        data_files([tmp_path, tmp_path / "b.jsonl"])
