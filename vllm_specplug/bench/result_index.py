# SPDX-License-Identifier: Apache-2.0
"""README.md of a folder of results: what each page shows, and what made it.

python -m vllm_specplug.bench.result_index bench/results
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_specplug.bench.result_page import distinct, why_remeasure
from vllm_specplug.bench.tables import markdown_table

_INDEX = "README.md"
_MARK = re.compile(r"^\*\*To be measured again\*\*: (.*?)\.?$", re.M)
_COMMAND = re.compile(r"(?:`(?=[^`\n]*\.py\b)|\bcommand: )([^`\n]+)")
_COMMIT = re.compile(r"\bcommit:? ([0-9a-f]{7,40}(?:\+changes)?)")


def index_text(folder: Path) -> str:
    """The table of all pages (*.md) below `folder`, from their records."""
    pages = sorted(page for page in folder.rglob("*.md") if page.name != _INDEX)
    rows = [_row(page, folder) for page in pages]
    header = ("page", "shows", "commit", "command", "models", "hardware", "stands")
    return "\n\n".join(
        (
            "# Results",
            "What each page shows and what made it; the `.json` beside a page has its numbers and "
            "the whole record, `_cells.jsonl` each single measurement. Made by "
            "`python -m vllm_specplug.bench.result_index bench/results`.",
            markdown_table(header, rows),
            "`+changes`: the checkout had uncommitted changes, so the numbers cannot be repeated "
            "from that commit. Models: eager or compiled (vLLM's default), on both sides of a "
            "comparison.\n",
        )
    )


def _row(page: Path, folder: Path) -> list[str]:
    text = page.read_text()
    title = re.search(r"^# (.+)$", text, re.M)
    values = page.with_suffix(".json")
    records = distinct(_records(json.loads(values.read_text()))) if values.is_file() else []
    if not any(record.get("commit") for record in records):
        records = [_record_in(text)]
    mark = _MARK.search(text)
    reasons = mark[1] if mark else why_remeasure(records)
    path = page.relative_to(folder).as_posix()
    return [
        f"[{path}]({path})",
        title[1] if title else page.stem,
        _joined(records, lambda r: r.get("commit")) or "not recorded",
        _joined(records, lambda r: r.get("command"), "`{}`", most=1) or "see the page",
        _joined(records, lambda r: r.get("execution")),
        _joined(records, _processor) or "see the page",
        f"measure again: {reasons}" if reasons else "yes",
    ]


def _records(value: Any) -> Iterator[Mapping[str, Any]]:
    """All records in JSON that name their commit."""
    if isinstance(value, dict):
        if "commit" in value:
            yield value
        else:
            for item in value.values():
                yield from _records(item)
    elif isinstance(value, list):
        for item in value:
            yield from _records(item)


def _record_in(text: str) -> dict[str, Any]:
    """The record of a page without JSON, from its text."""
    command, commit = _COMMAND.search(text), _COMMIT.search(text)
    return {
        "command": command and command[1],
        "commit": commit and commit[1],
        "execution": "eager" if "ran eager" in text else None,
    }


def _processor(record: Mapping[str, Any]) -> str | None:
    hardware = record.get("hardware") or {}
    return hardware.get("gpu") or hardware.get("cpu")


def _joined(records: Any, value: Any, form: str = "{}", most: int = 4) -> str:
    found = list(dict.fromkeys(v for record in records if (v := value(record))))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(form.format(v.replace("|", "\\|")) for v in found[:most]) + more


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / _INDEX).write_text(index_text(folder))


if __name__ == "__main__":
    main()
