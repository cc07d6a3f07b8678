# SPDX-License-Identifier: Apache-2.0
"""Pages of results: Markdown tables with their provenance, and the numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_specplug.bench.tables import markdown_table
from vllm_specplug.provenance import CHANGES, one_line


@dataclass(frozen=True)
class Section:
    """A table with an optional heading and notes."""

    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    title: str = ""
    notes: Sequence[str] = ()

    def to_markdown(self) -> str:
        heading = [f"## {self.title}"] if self.title else []
        table = [markdown_table(self.header, self.rows)] if self.header else []
        return "\n\n".join([*heading, *table, *self.notes])


@dataclass(frozen=True)
class ResultPage:
    """The results of a benchmark, written as NAME.md and NAME.json."""

    name: str
    title: str
    about: str
    """What was measured and how to read it."""
    sections: Sequence[Section]
    data: Any
    """All numbers, as plain data."""
    made_by: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Records of `provenance.provenance`, one per measurement or run."""

    def to_markdown(self) -> str:
        records = distinct(self.made_by)
        mark = why_remeasure(records)
        parts = [f"# {self.title}"]
        parts += [f"**To be measured again**: {mark}."] if mark else []
        parts += [self.about, *(section.to_markdown() for section in self.sections)]
        return "\n\n".join([*parts, *(one_line(record) for record in _merged(records))]) + "\n"

    def write(self, folder: Path) -> str:
        """Writes the files into `folder`; returns the text."""
        folder.mkdir(parents=True, exist_ok=True)
        text = self.to_markdown()
        (folder / f"{self.name}.md").write_text(text)
        values = {"title": self.title, "provenance": distinct(self.made_by), "data": self.data}
        (folder / f"{self.name}.json").write_text(json.dumps(values, indent=1) + "\n")
        return text


def distinct(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the distinct `records` in order."""
    return list({json.dumps(record, sort_keys=True): record for record in records}.values())


def _merged(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one record per machine and software, with all commands and commits."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        where = {k: v for k, v in record.items() if k not in ("command", "commit")}
        groups.setdefault(json.dumps(where, sort_keys=True), []).append(record)

    def joined(group: list[Mapping[str, Any]], key: str, between: str) -> str:
        return between.join(dict.fromkeys(str(record[key]) for record in group))

    return [
        {
            **group[0],
            "command": joined(group, "command", "`, `"),
            "commit": joined(group, "commit", ", "),
        }
        for group in groups.values()
    ]


def why_remeasure(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns why results with these records must be measured again; empty if they need not."""
    commits = [record.get("commit") for record in records]
    reasons = []
    if not commits or None in commits:
        reasons.append("no commit is recorded")
    if any(str(commit).endswith(CHANGES) for commit in commits):
        reasons.append("measured with uncommitted changes")
    if any(record.get("execution") == "eager" for record in records):
        reasons.append("all systems ran eager, not compiled as vLLM does by default")
    return "; ".join(reasons)
