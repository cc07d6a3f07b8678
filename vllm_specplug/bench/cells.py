# SPDX-License-Identifier: Apache-2.0
"""Measured cells in a JSONL file, one line each, kept across runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
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
        """Its key in the file."""
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

    def get(self, digest: str, key: Sequence[Any]) -> dict[str, Any] | None:
        """What was measured; None when it was not."""
        return self._rows.get((digest, *key))

    def rows(self, digest: str) -> list[dict[str, Any]]:
        """All cells of a digest, in the order they were first measured."""
        return [row for key, row in self._rows.items() if key[0] == digest]

    @property
    def latest_digest(self) -> str | None:
        """Digest of the cell written last; None when there is none."""
        return next(reversed(self._rows), (None,))[0]

    def count_others(self, digests: Collection[str]) -> int:
        """Cells that were measured with other settings, prompts or code."""
        return sum(key[0] not in digests for key in self._rows)

    def add(self, digest: str, key: Sequence[Any], values: Mapping[str, Any]) -> None:
        """Records a cell and writes it down; a cell measured again replaces the earlier one."""
        load_average = round(os.getloadavg()[0], 2)
        row = {"digest": digest, "key": list(key), "load_average": load_average, **values}
        self._rows[(digest, *key)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The leading line break ends a line that a kill cut off.
        with self.path.open("a") as stream:
            stream.write("\n" + json.dumps(row))


def digest(value: Any) -> str:
    """A short name for plain data, equal for equal data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
