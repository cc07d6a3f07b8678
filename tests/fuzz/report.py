# SPDX-License-Identifier: Apache-2.0
"""What the state machine did, kept as a table."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_specplug.provenance import provenance

COLUMNS = {
    "examples": "runs",
    "requests": "requests",
    "aborted": "aborted",
    "preempted": "preemptions",
    "cached": "prompt tokens from the prefix cache",
    "drafts": "trees verified",
    "verified": "nodes verified",
    "accepted": "nodes accepted",
}


def note(method: str, totals: Counter[str], seconds: float, folder: Path, command: str) -> None:
    """Puts one method's row into `fuzz.json`, which keeps the others, and redraws `fuzz.md`."""
    path = folder / "fuzz.json"
    rows: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    made_by = {**provenance(), "command": command}
    rows[method] = {**{name: totals[name] for name in COLUMNS}, "seconds": round(seconds, 1),
                    "provenance": made_by}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    (folder / "fuzz.md").write_text(page(rows))


def page(rows: dict[str, Any]) -> str:
    """The table, and below it what made each row."""
    total = {name: sum(row.get(name, 0) for row in rows.values()) for name in COLUMNS}
    lines = [
        "# Random orders of everything that can happen to a request",
        "",
        "Every output was at every step the beginning of what plain decoding gives that request",
        "alone, and after every run no block was missing and nothing was kept; see",
        "`tests/fuzz/engine_machine.py`. A run has up to thirty rules, then everything finishes.",
        "`oracle` is `ngram_tree` with a drafter that knows the answers.",
        "",
        f"| method | {' | '.join(COLUMNS.values())} | s |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for method, row in sorted(rows.items()):
        cells = " | ".join(str(row.get(name, "")) for name in COLUMNS)
        lines.append(f"| {method} | {cells} | {row['seconds']} |")
    lines.append(f"| all | {' | '.join(str(total[name]) for name in COLUMNS)} | |")
    made: dict[tuple[str, ...], list[str]] = {}
    for method, row in sorted(rows.items()):
        by = row["provenance"]
        packages = sorted(by["versions"].items())
        versions = ", ".join(f"{name} {value}" for name, value in packages if value)
        command = re.sub(r"\[.+\]", "[METHOD]", by["command"])
        key = (command, str(by["commit"]), by["hardware"]["cpu"], versions)
        made.setdefault(key, []).append(method)
    lines.append("")
    for (command, commit, cpu, versions), methods in made.items():
        lines += [
            f"{', '.join(methods)}: `{command}`, commit {commit}; one core of {cpu}; {versions}.",
            "",
        ]
    return "\n".join(lines)
