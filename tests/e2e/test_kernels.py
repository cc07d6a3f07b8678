# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 runner with our CPU kernels, without speculation; see kernel_checks.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.e2e import kernel_checks
from tests.e2e.fork_server import run_fresh
from tests.e2e.pair import check_names

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("kernel_checks")]


@cache
def failures(folder: Path) -> dict[str, str | None]:
    """Triton decides while it is imported whether its kernels are interpreted."""
    result, log = folder / "result.json", folder / "log"
    arguments = ["tests.e2e.kernel_checks", str(result)]
    run_fresh("tests.e2e.pair", arguments, log, env={"TRITON_INTERPRET": "1"}, timeout_s=900)
    assert result.is_file(), log.read_text()[-6000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton")
    return tmp_path_factory.mktemp("v2")


@pytest.mark.parametrize("name", check_names(kernel_checks))
def test_plain_v2(name: str, folder: Path) -> None:
    found = failures(folder)
    assert name in found, found
    assert found[name] is None, found[name]
