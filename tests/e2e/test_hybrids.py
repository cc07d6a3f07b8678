# SPDX-License-Identifier: Apache-2.0
"""Targets of attention and Gated DeltaNet layers: trees give what plain decoding gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.fork_server import run_forked

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("hybrid_checks")]

_FOLDER = Path(__file__).parent
CHECKS = re.findall(r"^def (check_\w+)", (_FOLDER / "hybrid_checks.py").read_text(), re.MULTILINE)
MORE = re.findall(r"^def (check_\w+)", (_FOLDER / "hybrid_full_checks.py").read_text(), re.M)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, str]]:
    return {}


def outcome(
    known: dict[tuple[str, bool], dict[str, str]], folder: Path, module: str, v2: bool, name: str
) -> str | None:
    """What failed in a check; all checks of a module run in one process."""
    if (module, v2) not in known:
        result, log = folder / "result.json", folder / "log"
        run_forked(
            "tests.e2e.pair",
            [f"tests.e2e.{module}", str(result)],
            log,
            env={"SPECPLUG_HYBRIDS_V2": str(int(v2))},
        )
        assert result.is_file(), log.read_text()[-6000:]
        known[module, v2] = json.loads(result.read_text())
    assert name in known[module, v2], f"{name} did not run"
    return known[module, v2][name]


@pytest.mark.parametrize("name", CHECKS)
def test_on_v2(name: str, outcomes, tmp_path: Path) -> None:
    assert outcome(outcomes, tmp_path, "hybrid_checks", True, name) is None


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKS)
def test_on_v1(name: str, outcomes, tmp_path: Path) -> None:
    assert outcome(outcomes, tmp_path, "hybrid_checks", False, name) is None


@pytest.mark.full
@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
@pytest.mark.parametrize("name", MORE)
def test_in_full(name: str, v2: bool, outcomes, tmp_path: Path) -> None:
    assert outcome(outcomes, tmp_path, "hybrid_full_checks", v2, name) is None
