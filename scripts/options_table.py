# SPDX-License-Identifier: Apache-2.0
"""The tables of options in docs/options.md, made from the declarations.

python scripts/options_table.py [--write]
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_specplug.bench.tables import markdown_table, replace_between
from vllm_specplug.option_docs import HEADER, method_options, shared_options
from vllm_specplug.registry import methods

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
_START, _END = "<!-- options: scripts/options_table.py --write -->", "<!-- /options -->"


def tables() -> str:
    """Returns a table of the shared options, and one per group of equal own options."""
    own: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for name, method in methods().items():
        if rows := method_options(method):
            own.setdefault(tuple(rows), []).append(f"`{name}`")
    parts = [markdown_table(HEADER, shared_options())]
    for rows, names in own.items():
        parts.append(f"### {', '.join(names)}\n\n{markdown_table(HEADER, rows)}")
    return "\n\n".join(parts)


def main() -> None:
    if "--write" not in sys.argv[1:]:
        print(tables())
        return
    PAGE.write_text(replace_between(PAGE.read_text(), _START, _END, f"\n{tables()}\n"))


if __name__ == "__main__":
    main()
