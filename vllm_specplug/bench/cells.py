# SPDX-License-Identifier: Apache-2.0
"""Measured cells in a JSONL file, one line each, kept across runs."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.bench.load import Level

MIX = "all"
"""Name of the traffic that takes prompts from all sets in turn."""


@dataclass(frozen=True)
class Cell:
    """One measurement: a server, the prompts it got, the load, which repeat."""

    server: str
    prompts: str
    level: Level
    repeat: int = 0

    @property
    def key(self) -> tuple[str, str, str, int]:
        """How it is found in a file."""
        return (self.server, self.prompts, self.level.key, self.repeat)


class CellStore:
    """Cells by digest (what else determines them) and key, each written down at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                # A line cut off by a kill is measured again.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    self._rows[(row["digest"], *row["key"])] = row

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, digest: str, cell: Cell) -> dict[str, Any] | None:
        """What was measured; None when it was not."""
        return self._rows.get((digest, *cell.key))

    def count_others(self, digests: set[str]) -> int:
        """Cells that were measured with other settings, prompts or code."""
        return sum(key[0] not in digests for key in self._rows)

    def add(self, digest: str, cell: Cell, values: dict[str, Any]) -> None:
        """Records a cell and writes it down."""
        row = {
            "digest": digest,
            "key": list(cell.key),
            "rate": cell.level.rate,
            "concurrency": cell.level.concurrency,
            "load_average": round(os.getloadavg()[0], 2),
            **values,
        }
        self._rows[(digest, *cell.key)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The leading line break ends a line that a kill cut off.
        with self.path.open("a") as stream:
            stream.write("\n" + json.dumps(row))
