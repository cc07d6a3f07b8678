# SPDX-License-Identifier: Apache-2.0
"""Fail when a file given on the command line is larger than 20 MB (the limit for a draft head)."""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT_BYTES = 20 * 1000 * 1000


def main(paths: list[str]) -> int:
    too_large = [p for p in map(Path, paths) if p.is_file() and p.stat().st_size > LIMIT_BYTES]
    for path in too_large:
        print(f"{path}: {path.stat().st_size} bytes, limit {LIMIT_BYTES}", file=sys.stderr)
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
