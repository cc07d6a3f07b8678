# SPDX-License-Identifier: Apache-2.0
"""Trees as on CUDA: the CUDA worker's classes, vLLM's Triton attention and the package's
Triton kernels, in Triton's interpreter, where there is no GPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.cuda.cuda_on_gpu import written_checks
from tests.e2e.fork_server import run_fresh

pytestmark = pytest.mark.e2e

# Importing the modules would put Triton's interpreter in place here.
CHECKS = [
    pytest.param(module, name, marks=[pytest.mark.full, pytest.mark.xdist_group(module)])
    for module in (
        "cuda_checks",
        "cuda_draft_checks",
        "cuda_graph_checks",
        "cuda_hybrid_checks",
        "cuda_self_checks",
        "cuda_stream_checks",
        "cuda_stream_target_checks",
        "cuda_token_scale_checks",
        "cuda_vision_checks",
        "cuda_window_checks",
    )
    for name in written_checks(module)
]
# In every run: what a user of CUDA gets by default, and that a wrong mask would show.
DEFAULTS = ("check_defaults_of_a_causal_block_head", "check_trees_without_their_mask_diverge")


@cache
def failures(module: str, folder: Path, *only: str) -> dict[str, str | None]:
    result, log = folder / f"{module}.json", folder / f"{module}.log"
    folder.mkdir(exist_ok=True)
    arguments = [f"tests.e2e.cuda.{module}", str(result), *only]
    environment = {"SPECPLUG_INTERPRETED": "1"}
    run_fresh("tests.e2e.pair", arguments, log, env=environment, timeout_s=1800)
    assert result.is_file(), log.read_text()[-6000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton")
    return tmp_path_factory.mktemp("cuda")


@pytest.mark.parametrize(("module", "name"), CHECKS)
def test_cuda(module: str, name: str, folder: Path) -> None:
    found = failures(module, folder)
    assert name in found, found
    assert found[name] is None, found[name]


@pytest.mark.xdist_group("cuda_defaults")
@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str, folder: Path) -> None:
    found = failures("cuda_checks", folder / "defaults", *DEFAULTS)
    assert found[name] is None, found[name]
