# SPDX-License-Identifier: Apache-2.0
"""The table of seams in docs/vllm_releases.md.

python scripts/seam_table.py [--write]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from vllm_specplug.seams import ALL_SEAMS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "vllm_releases.md"
_START, _END = "<!-- seams -->", "<!-- /seams -->"


def table() -> str:
    """Returns a table of topics in the list's order: what is done to which names, and why."""
    topics: dict[tuple[str, str], dict[str, list[str]]] = {}
    for seam in ALL_SEAMS:
        kinds = topics.setdefault((seam.key, seam.why), {})
        kinds.setdefault(seam.kind, []).append(f"`{seam.name.removeprefix('vllm.')}`")
    rows = ["| seam | what | why |", "|---|---|---|"]
    for (key, why), kinds in topics.items():
        what = "; ".join(f"{kind} {', '.join(names)}" for kind, names in kinds.items())
        rows.append(f"| `{key}` | {what} | {why} |")
    return "\n".join(rows)


def main() -> None:
    if "--write" not in sys.argv[1:]:
        print(table())
        return
    page = PAGE.read_text()
    block = f"{_START}\n{table()}\n{_END}"
    PAGE.write_text(re.sub(f"{_START}.*{_END}", lambda _: block, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
