# SPDX-License-Identifier: Apache-2.0
"""More of test_hybrids.py: on V1, other drafters, grammars, bfloat16."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.fork_server import run_forked

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("hybrid_checks")]


def rows() -> list[tuple[str, bool, str]]:
    """(module, whether on V1, check)."""
    found = []
    for module in ("hybrid_checks", "hybrid_full_checks", "hybrid_bf16_checks"):
        source = Path(__file__).with_name(f"{module}.py").read_text()
        checks = re.findall(r"^def (check_\w+)", source, re.MULTILINE)
        runners = (True,) if module == "hybrid_checks" else (False, True)
        found += [(module, on_v1, check) for on_v1 in runners for check in checks]
    return found


@cache
def failures(module: str, on_v1: bool) -> dict[str, str | None]:
    """Of all checks of a module, run in one process."""
    with TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        arguments = [f"tests.e2e.{module}", str(result)]
        run_forked("tests.e2e.pair", arguments, log, env={"SPECPLUG_HYBRIDS_V1": str(int(on_v1))})
        assert result.is_file(), log.read_text()[-6000:]
        return json.loads(result.read_text())


@pytest.mark.parametrize(("module", "on_v1", "name"), rows())
def test_equals_plain_decoding(module: str, on_v1: bool, name: str) -> None:
    assert failures(module, on_v1)[name] is None
