# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_specplug.bench.load as load_module
from vllm_specplug.bench.load import BURST, Level, LoadError, Traffic, run_load
from vllm_specplug.bench.server import ServerSpec, VllmServer

# Writes the result file where `vllm bench serve` is told to, one token a prompt.
FAKE_TOOL = """
import json, sys, time
from pathlib import Path
option = lambda name: sys.argv[sys.argv.index(name) + 1]
prompts = [json.loads(line)["prompt"] for line in Path(option("--dataset-path")).open()]
assert len(prompts) == int(option("--num-prompts"))
assert option("--temperature") == "0" and option("--seed") == "3"
if "crash" in prompts:
    sys.exit("the tool's own words")
if "hang" in prompts:
    time.sleep(60)
if "lost" in prompts:
    print("Error 0: prompt too long")
result = {"completed": len(prompts) - prompts.count("lost"), "output_throughput": 12.5,
    "duration": 2.0, "p50_tpot_ms": 4.0, "start_times": [1, 2], "argv": sys.argv}
Path(option("--result-dir"), option("--result-filename")).write_text(json.dumps(result))
"""
PAGE = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
"""


@pytest.fixture(autouse=True)
def fake_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "vllm_program", lambda: [sys.executable, "-c", FAKE_TOOL])
    pages = iter([PAGE.format(drafts=5, accepted=1), PAGE.format(drafts=15, accepted=8)])
    monkeypatch.setattr(VllmServer, "metrics_text", lambda self: next(pages))


def run(*prompts: str, level: Level = BURST, **options: Any) -> Any:
    server = VllmServer(ServerSpec("plain", "model"), Path("server.log"))
    return run_load(server, prompts, level, Traffic(8), seed=3, **options)


def test_reads_the_result_and_what_the_server_counted_meanwhile() -> None:
    result = run("a", "b", level=Level(rate=0.25))
    assert result.measured["output_throughput"] == 12.5 and "start_times" not in result.measured
    assert result.counters.drafts == 10
    assert result.counters.mean_acceptance_length == pytest.approx(1.7)
    assert result.command.startswith("vllm bench serve ")
    assert "--request-rate 0.25" in result.command and "/" not in result.command.split("--da")[1]
    assert result.to_json()["spec"]["accepted_tokens"] == 7


def test_traffic_is_told_to_the_tool() -> None:
    traffic = Traffic(8, 0.7, ignore_eos=True, chat=False, goodput=("tpot:50", "ttft:500"))
    text = " ".join(traffic.arguments())
    assert "--custom-output-len 8 --temperature 0.7 --ignore-eos --skip-chat-template" in text
    assert text.endswith("--goodput tpot:50 ttft:500")


def test_a_failing_tool_is_quoted() -> None:
    with pytest.raises(LoadError, match="the tool's own words"):
        run("crash")


def test_lost_requests_are_an_error_with_the_first_reason() -> None:
    with pytest.raises(LoadError, match=r"(?s)answered 1 of 2 requests.*prompt too long"):
        run("a", "lost")


def test_an_engine_that_hangs_is_given_up() -> None:
    with pytest.raises(LoadError, match=r"did not answer 1 requests \(all at once\) within 1 s"):
        run("hang", timeout_s=1.0)


def test_no_metrics_page_means_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: VllmServer) -> str:
        raise ConnectionRefusedError("connection refused")

    monkeypatch.setattr(VllmServer, "metrics_text", refused)
    with pytest.raises(LoadError, match="plain does not answer: connection refused"):
        run("a")
