# SPDX-License-Identifier: Apache-2.0
"""Trees on V2 as on CUDA: the CUDA worker's classes, vLLM's Triton attention and the package's
Triton kernels, in Triton's interpreter, where there is no GPU."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.fork_server import run_fresh

pytestmark = [pytest.mark.e2e, pytest.mark.full]

# Importing the module would put Triton's interpreter in place here.
_SOURCE = Path(__file__).with_name("cuda_v2_checks.py").read_text()
CHECKS = re.findall(r"^def (check_\w+)", _SOURCE, re.MULTILINE)


@cache
def failures(folder: Path) -> dict[str, str | None]:
    result, log = folder / "result.json", folder / "log"
    arguments = ["tests.e2e.cuda_v2_checks", str(result)]
    environment = {"SPECPLUG_INTERPRETED_V2": "1"}
    run_fresh("tests.e2e.pair", arguments, log, env=environment, timeout_s=1800)
    assert result.is_file(), log.read_text()[-6000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton")
    return tmp_path_factory.mktemp("cuda_v2")


@pytest.mark.xdist_group("cuda_v2")
@pytest.mark.parametrize("name", CHECKS)
def test_cuda_v2(name: str, folder: Path) -> None:
    found = failures(folder)
    assert name in found, found
    assert found[name] is None, found[name]
