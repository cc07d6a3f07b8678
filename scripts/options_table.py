# SPDX-License-Identifier: Apache-2.0
"""The tables of options in the documentation, made from their declarations.

python scripts/options_table.py            print them
python scripts/options_table.py --write    put them into docs/options.md
python scripts/options_table.py --check    exit 1 when docs/options.md differs
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_specplug.option_docs import HEADER, method_options, shared_options
from vllm_specplug.registry import methods

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
BEGIN, END = "<!-- options: scripts/options_table.py --write -->", "<!-- /options -->"


def tables() -> str:
    """The shared options, then those of each method that has some, as pipe tables."""
    parts = [_table(shared_options())]
    for name, method in methods().items():
        rows = method_options(method)
        if rows:
            parts.append(f"### Method `{name}`\n\n{_table(rows)}")
    return "\n\n".join(parts)


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = [HEADER, tuple("---" for _ in HEADER), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_tables(text: str) -> str:
    """`text` with what stands between the markers replaced.

    Raises:
        ValueError: when the markers are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        PAGE.write_text(with_tables(PAGE.read_text()))
    elif arguments == ["--check"]:
        if with_tables(PAGE.read_text()) != PAGE.read_text():
            print(f"docs/{PAGE.name}: the options differ; run scripts/options_table.py --write")
            return 1
    elif not arguments:
        print(tables())
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
