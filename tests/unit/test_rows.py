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
            r"message parts \['image_url'\], legal: text",
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
    assert [rows[i] for i in range(2)] == [
        (f"{path}:1", {"prompt": "ä"}), (f"{path}:3", {"prompt": "b"})
    ]  # fmt: skip
    assert rows.place(2) == f"{path}:4"
    with pytest.raises(ValueError, match="not JSON"):
        rows[2]


def test_lists_and_text_files_are_files_of_rows(tmp_path: Path) -> None:
    listed, text, table = (tmp_path / name for name in ("a.json", "b.txt", "c.parquet"))
    listed.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}]))
    assert [row["prompt"] for _, row in RowFile(listed)] == ["a", "b"]
    assert RowFile(listed).place(1) == f"{listed}:2"
    text.write_text("once\nupon")
    assert [row for _, row in RowFile(text)] == [{"text": "once\nupon"}]
    table.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"ends in '.parquet', legal: .jsonl, .json"):
        RowFile(table)
    with pytest.raises(ValueError, match="cannot be read"):
        RowFile(tmp_path / "nowhere.jsonl")


def test_what_is_left_out_is_counted_with_its_places() -> None:
    left_out = LeftOut()
    for line in range(1, 6):
        left_out.add("no answer", f"a:{line}")
    left_out.add("not JSON", "b:1")
    assert list(left_out.lines()) == [
        "5 x no answer: a:1, a:2, a:3, and 2 more", "1 x not JSON: b:1"
    ]  # fmt: skip
