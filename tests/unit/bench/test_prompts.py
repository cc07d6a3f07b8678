# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_specplug.bench.prompts import load_sets, mixed_prompts, prompt_of, read_prompts


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_first_user_message_is_the_prompt() -> None:
    """`test_rows` has the shapes of rows."""
    assert prompt_of({"turns": ["first", "second"], "category": "qa"}) == "first"
    said = [("system", "be brief"), ("user", "hi"), ("assistant", "hello")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert prompt_of({"messages": messages}) == "hi"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"quest": "b"}, r"none of the fields messages, .*quest"),
        ({"text": "b"}, "raw text, not a prompt"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, row: Any, reason: str) -> None:
    path = write_rows(tmp_path / "some.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(ValueError, match=rf"some.jsonl:2: .*{reason}"):
        read_prompts(path)


def test_order_is_fixed_and_long_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [{"question": f"question {i}"} for i in range(20)]
    path = write_rows(tmp_path / "gsm8k_test_dev.jsonl", [*rows, {"question": "x" * 9000}])
    found = read_prompts(path)
    assert found == read_prompts(path)
    assert found.name == "gsm8k"
    assert sorted(found.prompts) == sorted(row["question"] for row in rows)
    assert list(found.prompts) != [row["question"] for row in rows]
    with pytest.raises(ValueError, match="no prompt of up to 5 characters"):
        read_prompts(path, max_chars=5)


def test_a_folder_stands_for_its_files_without_training_data(tmp_path: Path) -> None:
    for name in ("b", "a", "gsm8k_train_questions"):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    (tmp_path / "README.md").write_text("not data")
    assert [(s.name, s.prompts) for s in load_sets([tmp_path])] == [("a", ("a",)), ("b", ("b",))]
    other = tmp_path / "other"
    other.mkdir()
    write_rows(other / "c.jsonl", [{"prompt": "c"}])
    assert [s.name for s in load_sets([tmp_path / "b.jsonl", other])] == ["b", "c"]


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist\. Point --data"):
        load_sets([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"holds no \*\.jsonl file"):
        load_sets([tmp_path])
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValueError, match="two data files are called 'a'"):
        load_sets([path, path])


def test_mixed_prompts_take_turns_and_wrap() -> None:
    sets = [["a0", "a1"], ["b0", "b1", "b2"]]
    assert mixed_prompts(sets, 0, 4) == ["a0", "b0", "a1", "b1"]
    assert mixed_prompts(sets, 4, 3) == ["a0", "b2", "a1"]
