# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io

from rich.console import Console

from vllm_specplug.bench.demo import Row, console_table, same_answers

ROWS = [
    Row("1 at a time", "plain", 40.04, None, None, 110.4, 25.02),
    Row("1 at a time", "jetspec", 56.06, 1.4, 1.734, 120.0, 17.8),
    Row("4 at a time", "plain", 160.0, None, None, 200.0, None),
]


def test_console_table_shows_every_number() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(console_table(ROWS, "a model"))
    text = console.file.getvalue()
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert ["1 at a time", "plain", "40.0", "1.00 x", "-", "110", "25.0"] in lines
    assert ["1 at a time", "jetspec", "56.1", "1.40 x", "1.73", "120", "17.8"] in lines
    assert ["4 at a time", "plain", "160.0", "1.00 x", "-", "200", "-"] in lines


def test_same_answers() -> None:
    assert same_answers(["x", "y", "z"], ["x", "y", "z"]) == (3, None)
    assert same_answers(["x", "y", "z"], ["x", "q", "z"]) == (2, 1)
