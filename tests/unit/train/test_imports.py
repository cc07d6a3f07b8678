# SPDX-License-Identifier: Apache-2.0
"""Imported answers are like generated ones; nothing is dropped without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.train.chat_targets import WORDS, chat_target, word_tokenizer
from vllm_specplug.train.answers import Answer, answer_shards, missing_shards, read_answers
from vllm_specplug.train.chat import ChatTokenizer
from vllm_specplug.train.cli import data_app
from vllm_specplug.train.imports import import_answers

runner = CliRunner()


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(folder: Path) -> list[Answer]:
    return [answer for shard in answer_shards(folder) for answer in read_answers(shard)]


def text(count: int, start: int = 10) -> str:
    """Distinct words."""
    return " ".join(WORDS[start : start + count])


def words(ids: tuple[int, ...]) -> str:
    return " ".join(WORDS[i] for i in ids)


def pair(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question},
                         {"role": "assistant", "content": answer}]}  # fmt: skip


def test_each_answer_of_a_row_is_imported_and_the_rest_is_counted(tmp_path: Path) -> None:
    long = pair("w10", text(40))
    turns = (("human", "w11"), ("gpt", text(5)), ("human", "w12"), ("gpt", text(6)))
    two = {"conversations": [{"from": role, "value": said} for role, said in turns]}
    rows = [long, two, pair("w10", "w11"), {"prompt": "w10"}, pair(text(40), "w9 w10 w11 w12"), two]
    first = written(tmp_path / "first.jsonl", rows)
    second = tmp_path / "second.json"
    second.write_text(json.dumps([{"instruction": "w13", "output": text(7)}, {"other": 1}]))
    chat = ChatTokenizer(word_tokenizer("plain"))
    done = import_answers([first, second], tmp_path / "data", chat, max_length=24, shard_size=2)
    answers = imported(tmp_path / "data")
    assert done.rows == 8 and done.answers == len(answers) == 4
    assert missing_shards(tmp_path / "data", 2) == []
    by_answer = {words(a.answer_ids): a for a in answers}
    assert by_answer.keys() == {text(20), f"{text(5)} </s>", f"{text(6)} </s>", f"{text(7)} </s>"}
    assert not by_answer[text(20)].finished and by_answer[f"{text(5)} </s>"].finished
    last = by_answer[f"{text(6)} </s>"]
    earlier = f"<user> w11 </s> <assistant> {text(5)} </s>"
    assert words(last.prompt_ids) == f"{earlier} <user> w12 </s> <assistant>"
    assert {a.source for a in answers} == {"first", "second"}
    assert {a.temperature for a in answers} == {0.0}
    assert done.answer_tokens == 20 + 6 + 7 + 8
    places = done.left_out.places
    (first_copy,) = set(places.pop("repeated answer"))
    assert Path(first_copy).name in ("first.jsonl:2", "first.jsonl:6")
    assert {what[:20]: [Path(p).name for p in where] for what, where in places.items()} == {
        "answer cut after 24 ": ["first.jsonl:1"],
        "answer of fewer than": ["first.jsonl:3"],
        "no answer in the row": ["first.jsonl:4"],
        "prompt of 24 tokens ": ["first.jsonl:5"],
        "none of the fields m": ["second.json:2"],
    }


def test_a_long_text_continues_in_another_answer(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(text(25))
    chat = ChatTokenizer(word_tokenizer(None))
    done = import_answers([path], tmp_path / "data", chat, max_length=10)
    answers = imported(tmp_path / "data")
    assert done.left_out.places == {}
    assert sorted(len(a.answer_ids) for a in answers) == [4, 9, 9]
    assert all(len(a.prompt_ids) == 1 for a in answers)
    joined = sorted(words(a.prompt_ids + a.answer_ids) for a in answers)
    assert " ".join(joined) == text(25)


def test_rows_are_shuffled_alike_every_time(tmp_path: Path) -> None:
    rows = [pair(f"w{10 + i}", text(8)) for i in range(30)]
    path = written(tmp_path / "a.jsonl", rows)
    chat = ChatTokenizer(word_tokenizer("plain"))
    orders = []
    for name in ("one", "two"):
        import_answers([path], tmp_path / name, chat, max_length=100)
        orders.append([a.prompt_ids for a in imported(tmp_path / name)])
    assert orders[0] == orders[1] != sorted(orders[0])


def test_an_interrupted_import_starts_again_and_a_finished_one_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [pair(f"w{10 + i}", text(8)) for i in range(9)])
    chat, out = ChatTokenizer(word_tokenizer("plain")), tmp_path / "data"

    def stop(row: int, total: int) -> None:
        if row == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_answers([path], out, chat, max_length=100, shard_size=2, on_row=stop)
    assert answer_shards(out)
    import_answers([path], out, chat, max_length=100, shard_size=4)
    assert len(imported(out)) == 9
    with pytest.raises(ValueError, match="holds answers already"):
        import_answers([path], out, chat, max_length=100)


def test_the_command_counts_what_it_imports(tmp_path: Path, target_folder: Path) -> None:
    target = chat_target(tmp_path / "chat", target_folder, "plain")
    rows = [pair(f"w{10 + i}", text(12, 10 + i)) for i in range(12)]
    path = written(tmp_path / "a.jsonl", [*rows, {"other": 1}])
    command = ["import", str(path), "--target", str(target), "--out", str(tmp_path / "data")]
    result = runner.invoke(data_app, command)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("12 answers of 13 rows")
    assert "1 x none of the fields" in result.stderr and f"{path}:13" in result.stderr
    (where,) = json.loads((tmp_path / "data" / "left_out.json").read_text()).values()
    assert where == [f"{path}:13"]

    # Bad options and files are named.
    written(path, [{"other": 1}])
    for arguments, words in (
        (["--max-length", "300"], "legal: 0..256"),
        (["--chat-template-kwargs", "x"], "legal: a JSON object"),
        (["--out", str(tmp_path / "other")], "none of the fields"),
    ):
        result = runner.invoke(data_app, [*command, *arguments])
        assert result.exit_code == 2 and words in result.stderr, result.output
