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

import httpx
import openai
import pytest

from tests.e2e.fork_server import run_code
from tests.e2e.tiny import make_text_target
from vllm_specplug.bench.server import ServerSpec, VllmServer

pytestmark = pytest.mark.e2e
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "stranger_method"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed, and nowhere else."""
    # A copy: building writes beside the sources.
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
               "--no-build-isolation", "--target", str(site), str(source)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return site


def _run(code: str, site: Path) -> str:
    # The variable is for processes that the code starts.
    path = f"import sys; sys.path.insert(0, {str(site)!r})"
    return run_code(f"{path}\n{code}", env={"PYTHONPATH": str(site)})


@pytest.mark.xdist_group("stranger")
def test_its_method_is_lossless_by_the_documented_call(site: Path) -> None:
    code = (
        "from vllm_specplug.testing import check_method\n"
        "report = check_method('successors', memory=256)\n"
        "print(report)\n"
        "assert report.passed"
    )
    assert "lossless" in _run(code, site)


@pytest.mark.xdist_group("stranger")
def test_its_options_are_shown_and_checked(site: Path) -> None:
    code = (
        "import json\n"
        "from vllm_specplug.option_docs import method_options\n"
        "from vllm_specplug.registry import get_method\n"
        "method = get_method('successors')\n"
        "rows = method_options(method)\n"
        "try:\n"
        "    method.parse_options({'memory': 1})\n"
        "except ValueError as error:\n"
        "    print(json.dumps([rows, str(error)]))"
    )
    rows, error = json.loads(_run(code, site).splitlines()[-1])
    assert rows == [
        ["`memory`", "int", "`512`", "2..65536", "Tokens before the anchor that are looked at."]
    ]
    assert "memory=1 is not usable: legal: int 2..65536. Correct it" in error and "512" in error


@pytest.fixture(scope="module")
def server(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server")
    target = make_text_target(folder / "target")
    spec = ServerSpec(
        name="stranger",
        model=str(target),
        speculative_config={"method": "successors", "num_speculative_tokens": 8, "tree_budget": 8},
        max_model_len=256,
        dtype="float32",
        enforce_eager=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        with VllmServer(spec, folder / "log.txt") as running:
            running.wait_healthy()
            yield running


@pytest.mark.xdist_group("stranger")
def test_it_is_served_over_http_with_trees_and_metrics(server: VllmServer) -> None:
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model,
        prompt="the cat and the dog and the cat and the dog and",
        max_tokens=48,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 48
    metrics = httpx.get(f"{server.base_url}/metrics").text
    drafted = [line for line in metrics.splitlines() if line.startswith("specplug:draft_nodes_t")]
    assert drafted and float(drafted[0].split()[-1]) > 0
