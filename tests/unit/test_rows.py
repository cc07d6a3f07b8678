# SPDX-License-Identifier: Apache-2.0
"""Rows are read by their fields; bad ones are named by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_specplug.rows import Conversation, LeftOut, RowFile, conversation_of


def chat(*texts: str) -> tuple[dict[str, str], ...]:
    """User and assistant in turn; "system: .." is a system message."""
    messages, roles = [], ["user", "assistant"] * len(texts)
    for text in texts:
        is_system = text.startswith("system: ")
        role = "system" if is_system else roles.pop(0)
        messages.append({"role": role, "content": text.removeprefix("system: ")})
    return tuple(messages)


OPENAI = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
          {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]  # fmt: skip
SHAREGPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"}]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": OPENAI, "prompt": "q"}, chat("system: s", "q", "a")),
        ({"conversations": SHAREGPT, "id": "1"}, chat("system: s", "q", "a")),
        ({"instruction": "do", "input": "", "output": "done", "text": "all"}, chat("do", "done")),
        ({"instruction": "do", "input": "x", "output": "d"}, chat("do\n\nx", "d")),
        ({"prompt": "p", "completion": "c"}, chat("p", "c")),
        # A logged request of a server, and one of a batch file.
        ({"model": "m", "messages": OPENAI[:2], "temperature": 0}, chat("system: s", "q")),
        ({"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "p"}}, chat("p")),
        # Benchmarks.
        (
            {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": "t"},
            chat("Complete this Python function.\n\ndef f():"),
        ),
        ({"task_id": 2, "text": "Write f.", "code": "x", "test_list": ["t"]}, chat("Write f.")),
        ({"task_id": 2, "prompt": "Write f.", "code": "x", "test_list": ["t"]}, chat("Write f.")),
        ({"question": "2 + 2?", "answer": "#### 4"}, chat("2 + 2?")),
        ({"problem": "Find x.", "solution": "x", "level": "Level 1"}, chat("Find x.")),
        ({"problem_idx": 1, "problem": "Find x.", "answer": 70}, chat("Find x.")),
        ({"question_title": "A", "question_content": "Sum.", "starter_code": ""}, chat("Sum.")),
        (
            {"question_content": "Sum.", "starter_code": "class S:"},
            chat("Sum.\n\n```python\nclass S:\n```"),
        ),
        ({"context": "long", "input": "why?", "answers": ["x"]}, chat("long\n\nwhy?")),
        ({"context": "code", "input": "", "answers": ["x"]}, chat("code")),
        ({"context": "c", "question": "q", "answers": {"text": ["x"]}}, chat("c\n\nq")),
        ({"instruction": "i", "context": "c", "response": "r"}, chat("i\n\nc", "r")),
        ({"system": "s", "conversations": SHAREGPT[1:]}, chat("system: s", "q", "a")),
        ({"system": "s", "conversations": SHAREGPT}, chat("system: s", "q", "a")),
        ({"system_prompt": "s", "question": "q", "response": "r"}, chat("system: s", "q", "r")),
        ({"messages": [OPENAI[1] | {"tool_calls": None}], "tools": []}, chat("q")),
    ],
)
def test_each_format_is_a_conversation(row: Any, messages: Any) -> None:
    assert conversation_of(row) == Conversation(messages)


@pytest.mark.parametrize(
    "row",
    [
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"prompt_id": 1, "category": "writing", "prompt": ["one", "two"], "reference": []},
    ],
)
def test_later_turns_are_kept_apart(row: Any) -> None:
    assert conversation_of(row) == Conversation(chat("one"), ("two",))


def test_raw_text_is_not_a_prompt() -> None:
    conversation = conversation_of({"text": "once upon", "meta": {}})
    assert conversation == Conversation(text="once upon")
    assert not conversation.has_answer


def test_what_is_asked_ends_before_the_answer() -> None:
    asked = conversation_of({"messages": [*OPENAI, {"role": "user", "content": "more"}]}).asked()
    assert [m["content"] for m in asked] == ["s", "q", "a", "more"]
    assert conversation_of({"messages": OPENAI}).asked() == chat("system: s", "q")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "not a JSON object"),
        ({"quest": "b"}, "none of the fields messages, .*text .*there: quest"),
        ({"prompt": 7}, "'prompt' holds no text"),
        ({"turns": []}, "'turns' is not a list with something in it"),
        ({"messages": [{"role": "system", "content": "x"}]}, "'messages' holds no text of a user"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot', legal: human, user"),
        ({"messages": [{"role": "user", "content": None}]}, "a message without text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a message part 'image_url', legal: 'text'",
        ),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "a role that is no text, legal"),
        *(
            ({"messages": [{"role": "user", "content": content}]}, reason)
            for content, reason in (
                (["a", {"type": "text", "text": "x"}], "part without a type, legal: 'text'"),
                ([], "a message without text"),
                ([{"type": []}], "part without a type"),
                ([{"type": "text"}], "a message without text"),
                ([{"type": "text", "text": None}], "a message without text"),
            )
        ),
        ({"prompt": "cut \ud83d"}, "'prompt' holds half of a surrogate pair"),
        ({"system": 7, "prompt": "p"}, "'system' has a message without text"),
        ({"instruction": "i", "context": ["c"]}, "'context' holds no text"),
        ({"messages": OPENAI, "tools": [{"type": "function"}]}, "the row has 'tools'"),
        ({"body": {"messages": OPENAI, "functions": [{}]}}, "the row has 'functions'"),
        (
            {"messages": [*OPENAI, {"role": "assistant", "tool_calls": [{}]}]},
            "a message in field 'messages' has 'tool_calls', which is not read",
        ),
        (
            {"messages": [{**OPENAI[-1], "reasoning_content": "why"}]},
            "a message in field 'messages' has 'reasoning_content'",
        ),
    ],
)
def test_a_bad_row_says_why(row: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        conversation_of(row)


def test_a_place_is_the_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "ä"}\n\n{"prompt": "b"}\nnot json\n', encoding="utf-8")
    rows = RowFile(path)
    assert [rows[i]["prompt"] for i in range(2)] == ["ä", "b"]
    assert [rows.place(i) for i in range(3)] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    with pytest.raises(ValueError, match="not JSON"):
        rows[2]


def test_rows_that_python_cannot_read_are_counted(tmp_path: Path) -> None:
    deep, number = "[" * 200_000, "9" * 6_000
    path, left_out = tmp_path / "a.jsonl", LeftOut()
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": {deep}\n{{"prompt": {number}}}\n')
    rows = RowFile(path)
    read = [rows.conversation(index, left_out) for index in range(3)]
    assert read == [Conversation(chat("a")), None, None]
    assert sorted(sum(left_out.places.values(), [])) == [f"{path}:2", f"{path}:3"]
    for content in (deep, f"[{number}]"):
        listed = tmp_path / "a.json"
        listed.write_text(content)
        with pytest.raises(ValueError, match=f"data file {listed} cannot be read"):
            RowFile(listed)


def test_an_answer_to_nothing_is_left_out_and_counted(tmp_path: Path) -> None:
    said = [SHAREGPT[0], {"from": "gpt", "value": "hello"}, *SHAREGPT[1:]]
    path, left_out = tmp_path / "a.jsonl", LeftOut()
    path.write_text(json.dumps({"conversations": said}))
    found = RowFile(path).conversation(0, left_out)
    assert found is not None and (found.place, found.source) == (f"{path}:1", "a")
    assert found == Conversation(chat("system: s", "q", "a"), is_cut=True)
    assert left_out.places == {"first message an answer, left out": [f"{path}:1"]}


def test_lists_and_text_files_are_files_of_rows(tmp_path: Path) -> None:
    listed, text, table = (tmp_path / name for name in ("a.json", "b.txt", "c.parquet"))
    listed.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}]))
    assert [row["prompt"] for row in RowFile(listed)] == ["a", "b"]
    assert RowFile(listed).place(1) == f"{listed}:2"
    text.write_text("once\nupon")
    assert [*RowFile(text)] == [{"text": "once\nupon"}]
    table.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"ends in '.parquet', legal: .jsonl, .json"):
        RowFile(table)
    with pytest.raises(ValueError, match="cannot be read"):
        RowFile(tmp_path / "nowhere.jsonl")
    for name, content in (("empty.jsonl", "\n"), ("empty.json", "[]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name} holds no rows; leave it out"):
            RowFile(tmp_path / name)


def test_what_is_left_out_is_counted_with_its_places() -> None:
    left_out = LeftOut()
    for line in range(1, 6):
        left_out.add("no answer", f"a:{line}")
    left_out.add("not JSON", "b:1")
    assert list(left_out.lines()) == [
        "5 x no answer: a:1, a:2, a:3, and 2 more", "1 x not JSON: b:1"
    ]  # fmt: skip


def test_a_report_is_short_and_printable() -> None:
    left_out = LeftOut()
    for kind in range(20):
        left_out.add(f"kind {kind}", f"a:{kind}")
    for line in range(2):
        left_out.add("fields \x1b[31m\n" + "x" * 10_000, f"b:{line}")
    first, *others = left_out.lines()
    assert first.startswith(r"2 x fields \x1b[31m\nxxx") and len(first) < 250
    assert len(others) == 10 and others[-1] == "11 x 11 other reasons"
