# SPDX-License-Identifier: Apache-2.0
"""Steps of every method, with the scheduler waiting for each of them and ahead of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.fork_server import run_fresh
from tests.e2e.pair import assert_check, written_checks

pytestmark = pytest.mark.e2e

# With vLLM's own kernels, interpreted.
INTERPRETED = ["check_greedy_and_seeded", "check_greedy_and_seeded_scheduled_ahead"]


@pytest.mark.xdist_group("step_checks")
@pytest.mark.parametrize("name", written_checks("step_checks"))
def test_steps(name: str) -> None:
    assert_check("tests.e2e.step_checks", name)


# In every run `kernels/test_cpu_kernels.py` compares each kernel with vLLM's own.
@pytest.mark.full
def test_steps_with_vllms_own_kernels(tmp_path: Path) -> None:
    result, log = tmp_path / "result.json", tmp_path / "log"
    arguments = ["tests.e2e.step_checks", str(result), *INTERPRETED]
    run_fresh("tests.e2e.pair", arguments, log, env={"SPECPLUG_INTERPRETED": "1"})
    assert result.is_file(), log.read_text()[-6000:]
    assert json.loads(result.read_text()) == dict.fromkeys(INTERPRETED), log.read_text()[-6000:]
