# SPDX-License-Identifier: Apache-2.0
"""README.md of a folder of results: what each page shows, and what made it.

python -m vllm_specplug.bench.result_index bench/results
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from vllm_specplug.bench.result_page import why_remeasure
from vllm_specplug.bench.tables import markdown_table

_INDEX = "README.md"
_MARK = re.compile(r"^\*\*To be measured again\*\*: (.*?)\.?$", re.M)
# The line at the foot of a page that `provenance.one_line` writes.
_FOOT = re.compile(
    r"^`(?P<commands>.+)`, commit (?P<commits>[^;]+?)(?:, (?P<execution>compiled|eager))?; "
    r"(?P<cpu>[^,;\n]+)[^;\n]*(?:; (?P<gpu>[^,;\n]+)[^;\n]*(?=;))?",
    re.M,
)


def index_text(folder: Path) -> str:
    """The table of all pages (*.md) below `folder`, from the records at their feet."""
    pages = sorted(page for page in folder.rglob("*.md") if page.name != _INDEX)
    rows = [_row(page, folder) for page in pages]
    header = ("page", "shows", "commit", "command", "models", "hardware", "stands")
    return "\n\n".join(
        (
            "# Results",
            "What each page shows and what made it. Made by "
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
    feet = [foot.groupdict() for foot in _FOOT.finditer(text)]
    commits = [commit for foot in feet for commit in foot["commits"].split(", ")]
    executions = [foot["execution"] for foot in feet]
    mark = _MARK.search(text)
    reasons = mark[1] if mark else why_remeasure([{"commit": commit} for commit in commits])
    path = page.relative_to(folder).as_posix()
    return [
        f"[{path}]({path})",
        title[1] if title else page.stem,
        _joined(commits) or "not recorded",
        _joined([c for foot in feet for c in foot["commands"].split("`, `")], "`{}`", most=1)
        or "see the page",
        _joined(executions),
        _joined(foot["gpu"] or foot["cpu"] for foot in feet) or "see the page",
        f"measure again: {reasons}" if reasons else "yes",
    ]


def _joined(values: Iterable[str | None], form: str = "{}", most: int = 4) -> str:
    found = list(dict.fromkeys(value for value in values if value))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(form.format(v.replace("|", "\\|")) for v in found[:most]) + more


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / _INDEX).write_text(index_text(folder))


if __name__ == "__main__":
    main()
