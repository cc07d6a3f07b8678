# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_specplug.bench.prompts import MAX_PROMPT_CHARS, load_prompts, mixed_prompts


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_reads_each_set_by_its_own_field(tmp_path: Path) -> None:
    write_rows(tmp_path / "spec_bench_dev.jsonl", [{"turns": ["first", "second"]}])
    write_rows(tmp_path / "humaneval_dev.jsonl", [{"prompt": "def f():"}])
    write_rows(tmp_path / "gsm8k_test_dev.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    assert load_prompts(tmp_path, "spec_bench") == ["first"]
    assert load_prompts(tmp_path, "humaneval")[0].endswith("def f():")
    assert load_prompts(tmp_path, "gsm8k") == ["2 + 2?"]


def test_order_is_fixed_and_long_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [{"question": f"question {i}"} for i in range(20)]
    write_rows(tmp_path / "gsm8k_test_dev.jsonl", [*rows, {"question": "x" * MAX_PROMPT_CHARS * 2}])
    first = load_prompts(tmp_path, "gsm8k")
    assert first == load_prompts(tmp_path, "gsm8k")
    assert sorted(first) == sorted(row["question"] for row in rows)
    assert first != [row["question"] for row in rows]


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown; known: spec_bench, humaneval, gsm8k"):
        load_prompts(tmp_path, "mmlu")
    with pytest.raises(ValueError, match=r"gsm8k_test_dev.jsonl does not exist.*--data"):
        load_prompts(tmp_path, "gsm8k")
    (tmp_path / "gsm8k_test_dev.jsonl").write_text('{"question": "a"}\n{"quest": "b"}\n')
    with pytest.raises(ValueError, match="line 2: not a row of gsm8k"):
        load_prompts(tmp_path, "gsm8k")


def test_mixed_prompts_take_turns_and_wrap() -> None:
    sets = [["a0", "a1"], ["b0", "b1", "b2"]]
    assert mixed_prompts(sets, 0, 4) == ["a0", "b0", "a1", "b1"]
    assert mixed_prompts(sets, 4, 3) == ["a0", "b2", "a1"]
