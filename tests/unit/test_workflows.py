# SPDX-License-Identifier: Apache-2.0
"""The workflows of a forge run commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(path: Path) -> list[str]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_exist(path: Path) -> None:
    found = commands(path)
    assert found
    for command in found:
        words = command.split()
        if words[0] == "make":
            assert words[1] in TARGETS, command
        for word in words:
            if word.startswith(("scripts/", ".ci/", "docker/")):
                assert (ROOT / word).is_file(), command
        # The index of packages is a variable of the forge.
        assert "://" not in command, command


def test_each_job_may_only_read() -> None:
    assert len(WORKFLOWS) >= 4
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path
