# SPDX-License-Identifier: Apache-2.0
"""The commands in the blocks of a page of the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = (
    "vllm",
    "specplug",
    "pip",
    "make",
    "python",
    "curl",
    ".venv/bin/",
    "bench/",
    "examples/",
)


def commands_of(page: Path) -> Iterator[str]:
    """The commands in a page's blocks, each in one line of the page or continued as in a shell."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
        if language not in ("", "bash"):
            continue
        lines = iter(block.splitlines())
        for line in lines:
            if not line.startswith(PROGRAMS):
                continue
            while not is_whole(line):
                line += "\n" + next(lines)
            yield line


def is_whole(command: str) -> bool:
    """Whether a shell would not wait for another line."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.endswith("\\")
