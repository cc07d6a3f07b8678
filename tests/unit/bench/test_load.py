# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_specplug.bench.load as load_module
from vllm_specplug.bench.load import LoadError, run_load
from vllm_specplug.bench.server import ServerSpec, VllmServer

# Writes the result file where `vllm bench serve` is told to, one token a prompt.
FAKE_TOOL = """
import json, sys
from pathlib import Path
option = lambda name: sys.argv[sys.argv.index(name) + 1]
prompts = [json.loads(line)["prompt"] for line in Path(option("--dataset-path")).open()]
assert len(prompts) == int(option("--num-prompts"))
assert option("--temperature") == "0" and option("--max-concurrency") == "4"
result = {"completed": len(prompts) - prompts.count("lost"), "output_throughput": 12.5,
    "duration": 2.0, "total_output_tokens": 25, "median_ttft_ms": 3.0, "median_tpot_ms": 4.0}
if "draft" in prompts:
    result |= {"spec_decode_num_drafts": 10, "spec_decode_draft_tokens": 80,
        "spec_decode_accepted_tokens": 7}
if "crash" in prompts:
    sys.exit("the tool's own words")
Path(option("--result-dir"), option("--result-filename")).write_text(json.dumps(result))
"""


@pytest.fixture(autouse=True)
def fake_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "vllm_program", lambda: [sys.executable, "-c", FAKE_TOOL])


def run(*prompts: str) -> Any:
    server = VllmServer(ServerSpec("plain", "model"), Path("server.log"), port=1)
    return run_load(server, prompts, concurrency=4, output_len=8)


def test_reads_the_result() -> None:
    result = run("a", "b")
    assert result.tokens_per_s == 12.5 and result.output_tokens == 25
    assert result.mean_acceptance_length is None
    assert run("draft").mean_acceptance_length == pytest.approx(1.7)


def test_a_failing_tool_is_quoted() -> None:
    with pytest.raises(LoadError, match="the tool's own words"):
        run("crash")


def test_lost_requests_are_an_error() -> None:
    with pytest.raises(LoadError, match="answered 1 of 2 requests"):
        run("a", "lost")
