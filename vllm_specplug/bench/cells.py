# SPDX-License-Identifier: Apache-2.0
"""Measured cells in a JSONL file, kept across runs."""

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
"""Name of the traffic with prompts of all sets in turn."""


@dataclass(frozen=True)
class Cell:
    """A measurement: server, prompts, load and repeat."""

    server: str
    prompts: str
    level: Level
    repeat: int = 0

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Its key in the file."""
        return (self.server, self.prompts, self.level.key, self.repeat)


class CellStore:
    """Cells by key and by the digest of all settings that determine them, written at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                # A cell whose line was cut off is measured again.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    self._rows[(row["digest"], *row["key"])] = row

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, digest: str, key: Sequence[Any]) -> dict[str, Any] | None:
        """Returns a cell; None if it was not measured."""
        return self._rows.get((digest, *key))

    def rows(self, digest: str) -> list[dict[str, Any]]:
        """Returns the cells of a digest, in the order of their first measurement."""
        return [row for key, row in self._rows.items() if key[0] == digest]

    @property
    def latest_digest(self) -> str | None:
        """Digest of the last cell; None without cells."""
        return next(reversed(self._rows), (None,))[0]

    def count_others(self, digests: Collection[str]) -> int:
        """Returns the number of cells with other digests."""
        return sum(key[0] not in digests for key in self._rows)

    def add(self, digest: str, key: Sequence[Any], values: Mapping[str, Any]) -> None:
        """Records and writes a cell. It replaces an earlier one with the same key."""
        load_average = round(os.getloadavg()[0], 2)
        row = {"digest": digest, "key": list(key), "load_average": load_average, **values}
        self._rows[(digest, *key)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The leading line break ends a line that was cut off.
        with self.path.open("a") as stream:
            stream.write("\n" + json.dumps(row))


def digest(value: Any) -> str:
    """Returns a short digest of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
