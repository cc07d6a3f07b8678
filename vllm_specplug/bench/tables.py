# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables as text."""

from __future__ import annotations

import re
from collections.abc import Sequence


def format_number(value: float | None, digits: int) -> str:
    """Returns a number for a table; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a pipe table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def replace_between(text: str, start: str, end: str, block: str) -> str:
    """Returns `text` with `block` in place of everything between two markers."""
    return re.sub(f"{start}.*{end}", lambda _: f"{start}\n{block}\n{end}", text, flags=re.DOTALL)
