# SPDX-License-Identifier: Apache-2.0
"""The predictions as tables of docs/kernels_gpu.md: `python scripts/gpu/prediction_tables.py
[--write]`. A test compares them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER)]

from bounds import CONTEXTS, H100, H200, NODES, attention_us, scheme_cycles, step_ms  # noqa: E402
from predictions import PREDICTIONS  # noqa: E402

PAGE = FOLDER.parents[1] / "docs" / "kernels_gpu.md"
# Kind, nodes.
STEPS = (("plain", 0), ("chain", 3), ("tree", 16), ("tree", 64), ("tree", 256))


def _table(titles: Sequence[str], lines: Iterable[Sequence[object]], numbers: int) -> str:
    """Markdown; the last `numbers` columns are of numbers."""
    rule = ["---"] * (len(titles) - numbers) + ["---:"] * numbers
    rows = [titles, rule, *(list(map(str, line)) for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def bounds_table() -> str:
    lines = [(p.what, p.bound_text, p.why) for p in PREDICTIONS]
    return _table(("What", "Bound", "Why"), lines, 0)


def attention_table() -> str:
    """Microseconds of one layer on an H200."""
    titles = ("context", *(f"{n} nodes" for n in NODES))
    lines = [(f"{c // 1024}k", *(f"{attention_us(c, n, H200):.0f}" for n in NODES))
             for c in CONTEXTS]  # fmt: skip
    return _table(titles, lines, len(NODES))


def _blocks(rows: Sequence[int]) -> str:
    counts = [(size, len(list(same))) for size, same in groupby(rows)]
    return " + ".join(f"{count} x {size}" if count > 2 else " + ".join([str(size)] * count)
                      for size, count in counts)  # fmt: skip


def scheme_table() -> str:
    """Cycles of both schemes of the Hopper kernel."""
    lines = []
    for nodes in NODES[1:]:
        both = scheme_cycles(nodes)
        lines.append(
            (nodes, _blocks(both.turns_blocks), both.turns, _blocks(both.specialised_blocks),
             both.specialised, f"{both.ratio:.2f}")
        )  # fmt: skip
    titles = ("nodes", "blocks in turns", "cycles", "specialised blocks", "cycles", "ratio")
    return _table(titles, lines, 0)


def step_table() -> str:
    """Milliseconds of a step at a context of 1k, batch 1."""
    lines = []
    for kind, nodes in STEPS:
        values = [step_ms(kind, nodes, 1024, device) for device in (H100, H200)]
        beside = values[0] / step_ms("plain", 0, 1024, H100)
        name = {"plain": "plain", "chain": f"vLLM's EAGLE-3 chain of {nodes}",
                "tree": f"a tree of {nodes}, block head"}[kind]  # fmt: skip
        lines.append((name, *(f"{ms:.1f}" for ms in values), f"{beside:.2f}"))
    return _table(("step", "H100, ms", "H200, ms", "H100, beside plain"), lines, 3)


TABLES = {
    "predicted bounds": bounds_table,
    "predicted attention": attention_table,
    "predicted cycles": scheme_table,
    "predicted steps": step_table,
}


def filled(page: str) -> str:
    """`page` with every table between its marks.

    Raises:
        ValueError: when a mark is missing.
    """
    for mark, make in TABLES.items():
        block = f"<!-- {mark} -->\n{make()}\n<!-- /{mark} -->"
        pattern = f"<!-- {mark} -->.*<!-- /{mark} -->"
        page, count = re.subn(pattern, lambda _, b=block: b, page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places for {mark!r}, legal: 1")
    return page


def main() -> None:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        print(*(make() for make in TABLES.values()), sep="\n\n")


if __name__ == "__main__":
    main()
