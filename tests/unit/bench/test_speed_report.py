# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_specplug.bench.speed_report import summarize, to_markdown, write_report

RECORD = {
    "command": "specplug bench",
    "commit": "abc",
    "versions": {"vllm": "0.32.0"},
    "hardware": {"cpu": "a CPU", "logical_cpus": 2, "extensions": ["avx2"], "memory_gib": 8.0},
}


def cell(key: tuple[str, ...], tokens_per_s: float, drafts: int | None = None) -> dict[str, Any]:
    return {
        "key": list(key),
        "tokens_per_s": tokens_per_s,
        "median_ttft_ms": 100.0,
        "median_tpot_ms": 20.0,
        "drafts": drafts,
        "draft_tokens": None if drafts is None else 8 * drafts,
        "accepted_tokens": None if drafts is None else drafts // 2,
    }


SPEED = [
    cell(("speed", "0", "1", "plain"), 40.0),
    cell(("speed", "1", "1", "plain"), 20.0),  # a slow minute of the machine
    cell(("speed", "2", "1", "plain"), 42.0),
    cell(("speed", "0", "1", "jetspec-8"), 60.0, 100),
    cell(("speed", "1", "1", "jetspec-8"), 28.0, 100),
    cell(("speed", "2", "1", "jetspec-8"), 63.0, 200),
]
LENGTH = [
    cell(("length", "jetspec-8-best_first", "gsm8k"), 1.0, 10),
    cell(("length", "jetspec-8-best_first", "humaneval"), 1.0, 0),
]


def test_speed_up_is_the_median_of_paired_ratios() -> None:
    rows = {row["method"]: row for row in summarize(SPEED, [])["speed"]}
    assert rows["plain"]["tokens_per_s"] == 40.0
    assert rows["plain"]["speed_up"] == 1.0
    assert rows["jetspec-8"]["speed_up"] == pytest.approx(1.5)
    assert rows["jetspec-8"]["speed_up_range"] == pytest.approx([1.4, 1.5])
    assert rows["jetspec-8"]["mean_acceptance_length"] == pytest.approx(1.5)
    assert rows["plain"]["mean_acceptance_length"] is None


def test_lengths_by_prompt_set() -> None:
    rows = summarize([], LENGTH)["length"]
    assert rows[0]["mean_acceptance_length"] == pytest.approx(1.5)
    assert rows[0]["nodes_per_draft"] == pytest.approx(8.0)
    assert rows[1]["mean_acceptance_length"] is None


def test_markdown_names_numbers_and_their_origin() -> None:
    text = to_markdown(summarize(SPEED, LENGTH), RECORD)
    assert "| 1 | jetspec-8 | 60.0 | 1.50 x | 1.40-1.50 | 1.50 | 100 | 20.0 |" in text
    assert "| jetspec-8-best_first | 1.50 | - |" in text
    assert "`specplug bench`, commit abc; a CPU, 2 logical CPUs (avx2), 8.0 GiB" in text


def test_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = write_report(summarize(SPEED, LENGTH), RECORD, tmp_path / "results")
    assert [path.name for path in paths] == ["speed.json", "speed.md", "speed.png"]
    assert json.loads(paths[0].read_text())["speed"][1]["method"] == "jetspec-8"
    assert paths[2].read_bytes()[:4] == b"\x89PNG"
