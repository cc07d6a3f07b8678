# SPDX-License-Identifier: Apache-2.0
"""More of test_hybrids.py: on V1, images, other drafters, grammars, bfloat16."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.fork_server import run_forked
from tests.e2e.pair import written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("hybrid_checks")]


def rows() -> list[tuple[str, bool, str]]:
    """(module, whether on V1, check)."""
    on_v1_alone = ("hybrid_checks", "qwen3_5_checks")
    on_both = ("qwen3_5_image_checks", "hybrid_full_checks", "hybrid_bf16_checks")
    return [
        (module, on_v1, check)
        for module in (*on_v1_alone, *on_both)
        for on_v1 in ((True,) if module in on_v1_alone else (False, True))
        for check in written_checks(module)
    ]


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
