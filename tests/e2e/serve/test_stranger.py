# SPDX-License-Identifier: Apache-2.0
"""A third-party package brings a method, and gets trees, budget, metrics and the server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.served import MARK, Server
from tests.e2e.tiny import make_text_target
from vllm_specplug.bench.server import free_port
from vllm_specplug.option_docs import method_options
from vllm_specplug.registry import get_method

pytestmark = [pytest.mark.e2e, MARK]
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "stranger_method"


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Installs the package in a folder, for this process and its children."""
    # A copy: building writes beside the sources.
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
               "--no-build-isolation", "--target", str(site), str(source)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        yield


def test_its_method_is_lossless_by_the_documented_call() -> None:
    from vllm_specplug.testing import check_method

    report = check_method("successors", memory=256)
    assert report.passed, report


def test_its_options_are_shown_and_checked() -> None:
    method = get_method("successors")
    assert method_options(method) == [
        ("`memory`", "int", "`512`", "2..65536", "Tokens before the anchor that are looked at.")
    ]
    with pytest.raises(ValueError, match="memory=1 is not usable: legal: int 2..65536. Correct it"):
        method.parse_options({"memory": 1})


def test_it_is_served_over_http_with_trees_and_metrics(tmp_path: Path) -> None:
    port = free_port()
    options = {"method": "successors", "num_speculative_tokens": 8, "tree_budget": 8}
    arguments = [
        str(make_text_target(tmp_path / "target")), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
        "--speculative-config", json.dumps(options),
    ]  # fmt: skip
    request = {
        "prompt": "the cat and the dog and the cat and the dog and",
        "max_tokens": 48,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    with Server([arguments], port, tmp_path) as server:
        assert len(server.complete(request)) == 48
        assert server.metric("specplug:draft_nodes_total")["0"] > 0
