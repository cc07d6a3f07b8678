# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_specplug.bench.result_page import ResultPage, Section, why_remeasure

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


def record(**values: Any) -> dict[str, Any]:
    machine = {"cpu": "a CPU", "logical_cpus": 2, "extensions": ["avx2"], "memory_gib": 8.0}
    return {"command": "python bench/a.py", "commit": "0123456789ab", "execution": "compiled",
            "versions": {"vllm": "0.32.0"}, "hardware": machine, **values}  # fmt: skip


def page(*records: dict[str, Any]) -> ResultPage:
    table = Section(("system", "tokens/s"), [("plain", "1.0")], "One", ["A note."])
    return ResultPage("a", "Title", "About.", [table], [{"plain": 1.0}], records)


def test_a_page_has_its_tables_numbers_and_origin(tmp_path: Path) -> None:
    other = record(command="python bench/a.py --eager", commit="ba9876543210")
    text = page(record(), record(), other).write(tmp_path)
    assert text == (tmp_path / "a.md").read_text()
    assert text.startswith("# Title\n\nAbout.\n\n## One\n\n| system | tokens/s |")
    assert "| plain | 1.0 |\n\nA note." in text
    assert "`python bench/a.py`, `python bench/a.py --eager`, commit 0123456789ab, ba98" in text
    values = json.loads((tmp_path / "a.json").read_text())
    assert values["data"] == [{"plain": 1.0}] and values["provenance"] == [record(), other]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, ""),
        ({"commit": "0123456789ab+changes"}, "uncommitted changes"),
        ({"commit": None}, "no commit"),
        ({"execution": "eager"}, "eager"),
    ],
)
def test_results_that_do_not_stand_say_why(
    tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    assert bool(why_remeasure([record(**values)])) == bool(reason)
    text = page(record(), record(**values)).write(tmp_path)
    assert ("**To be measured again**" in text) == bool(reason)


def test_the_index_lists_every_published_page() -> None:
    linked = set(re.findall(r"\]\((.+?)\)", (RESULTS / "README.md").read_text()))
    assert linked == {page.name for page in RESULTS.glob("*.md")} - {"README.md"}


def test_every_published_page_that_does_not_stand_is_marked() -> None:
    for path in RESULTS.glob("*.md"):
        text = path.read_text()
        assert "+changes" not in text or "**To be measured again**" in text, path.name
