# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_specplug.bench.result_index import index_text
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
    row = next(line for line in index_text(tmp_path).splitlines() if "[a.md](a.md)" in line)
    assert row.endswith("| yes |") if not reason else reason in row
    assert "| Title |" in row and "0123456789ab" in row and "a CPU" in row


def test_an_index_reads_pages_without_numbers_beside_them(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# B\n\n`python b.py --x`, commit abcdef012345; a CPU\n")
    (tmp_path / "c.md").write_text("# C\n\n**To be measured again**: it is old.\n")
    rows = index_text(tmp_path).splitlines()
    assert any(
        row.startswith("| [b.md](b.md) | B | abcdef012345 | `python b.py --x` |")
        and row.endswith("| yes |")
        for row in rows
    )
    assert any(
        row.startswith("| [c.md](c.md) | C | not recorded |")
        and row.endswith("| measure again: it is old |")
        for row in rows
    )


def test_the_published_index_is_up_to_date() -> None:
    """`python -m vllm_specplug.bench.result_index bench/results` makes it so."""
    assert (RESULTS / "README.md").read_text() == index_text(RESULTS)


def test_every_published_page_that_does_not_stand_is_marked() -> None:
    for row in index_text(RESULTS).splitlines():
        if "| measure again" in row:
            name = row.split("](")[1].split(")")[0]
            assert "**To be measured again**" in (RESULTS / name).read_text(), name
