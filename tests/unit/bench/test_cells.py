# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

from vllm_specplug.bench.cells import MIX, Cell, CellStore
from vllm_specplug.bench.load import BURST, IDLE, Level

CELL = Cell("plain", MIX, Level(rate=0.5))


def test_store_keeps_cells_in_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    CellStore(path).add("abc", CELL.key, {"duration": 3.0})
    row = json.loads(path.read_text())
    assert row["key"] == ["plain", "all", "rate=0.5", 0] and row["duration"] == 3.0
    store = CellStore(path)
    assert store.get("abc", CELL.key) == row
    assert store.get("other", CELL.key) is None and store.count_others({"other"}) == 1
    assert store.get("abc", (*CELL.key[:3], 1)) is None


def test_levels_have_names_options_and_an_order() -> None:
    levels = [Level(concurrency=8), BURST, Level(rate=2.0), Level(rate=0.25), IDLE]
    ordered = sorted(levels, key=lambda level: level.order)
    assert [level.key for level in ordered] == [
        "concurrency=1", "rate=0.25", "rate=2", "burst", "concurrency=8",
    ]  # fmt: skip
    assert [level.arguments() for level in ordered[:2]] == [
        ["--max-concurrency", "1"],
        ["--request-rate", "0.25"],
    ]
    assert BURST.arguments() == []
