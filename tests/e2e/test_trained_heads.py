# SPDX-License-Identifier: Apache-2.0
"""Heads that were trained for tiny targets of each family draft what these accept."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.fork_server import run_forked
from tests.e2e.pair import written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("trained_head_checks")]

MODULE = "trained_head_checks"


@cache
def failures(on_v1: bool, *only: str) -> dict[str, str | None]:
    """Of checks run in one process."""
    with TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        arguments = [f"tests.e2e.{MODULE}", str(result), *only]
        run_forked("tests.e2e.pair", arguments, log, env={"SPECPLUG_HEADS_V1": str(int(on_v1))})
        assert result.is_file(), log.read_text()[-6000:]
        return json.loads(result.read_text())


def test_a_head_for_windows_and_groups() -> None:
    name = "check_gemma_3"
    assert failures(False, name)[name] is None


@pytest.mark.full
@pytest.mark.parametrize("on_v1", [False, True], ids=["v2", "v1"])
@pytest.mark.parametrize("name", written_checks(MODULE))
def test_each_family(on_v1: bool, name: str) -> None:
    assert failures(on_v1)[name] is None
