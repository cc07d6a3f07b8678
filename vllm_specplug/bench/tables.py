# SPDX-License-Identifier: Apache-2.0
"""Rows of a comparison, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

COLUMNS = ("chats", "server", "tokens/s", "speed-up", "length", "TTFT ms", "TPOT ms")


@dataclass(frozen=True)
class Row:
    """One server under one load."""

    load: str
    server: str
    tokens_per_s: float
    speed_up: float | None
    """Ratio to plain vLLM under the same load; None for plain itself."""
    mean_acceptance_length: float | None
    """1 + accepted / drafts; None without speculation."""
    ttft_ms: float
    tpot_ms: float | None

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `COLUMNS`."""
        return (
            self.load,
            self.server,
            f"{self.tokens_per_s:.1f}",
            "1.00 x" if self.speed_up is None else f"{self.speed_up:.2f} x",
            _number(self.mean_acceptance_length, 2),
            f"{self.ttft_ms:.0f}",
            _number(self.tpot_ms, 1),
        )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def console_table(rows: Sequence[Row], title: str) -> Table:
    """A rich table of `rows`, a rule between loads."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].load != row.load
        style = "bold" if (row.speed_up or 0.0) > 1.0 else None
        table.add_row(*row.cells(), end_section=last, style=style)
    return table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def same_answers(plain: Sequence[str], other: Sequence[str]) -> tuple[int, int | None]:
    """How many answers are equal, and the index of the first that is not (None: all are)."""
    assert len(plain) == len(other)
    differing = [i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b]
    return len(plain) - len(differing), differing[0] if differing else None
