# SPDX-License-Identifier: Apache-2.0
"""The table of seams in docs/vllm_releases.md.

python scripts/seam_table.py [--write]
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_specplug.bench.tables import markdown_table, replace_between
from vllm_specplug.seams import ALL_SEAMS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "vllm_releases.md"
_START, _END = "<!-- seams -->", "<!-- /seams -->"


def table() -> str:
    """Returns a table of topics in the list's order: what is done to which names, and why."""
    topics: dict[tuple[str, str], dict[str, list[str]]] = {}
    for seam in ALL_SEAMS:
        kinds = topics.setdefault((seam.topic.key, seam.topic.why), {})
        names = (target.replace(":", ".").removeprefix("vllm.") for target in seam.targets)
        kinds.setdefault(seam.kind, []).extend(f"`{name}`" for name in names)
    rows = []
    for (key, why), kinds in topics.items():
        what = "; ".join(f"{kind} {', '.join(names)}" for kind, names in kinds.items())
        rows.append((f"`{key}`", what, why))
    return markdown_table(("seam", "what", "why"), rows)


def main() -> None:
    if "--write" not in sys.argv[1:]:
        print(table())
        return
    PAGE.write_text(replace_between(PAGE.read_text(), _START, _END, table()))


if __name__ == "__main__":
    main()
