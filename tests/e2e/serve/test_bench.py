# SPDX-License-Identifier: Apache-2.0
"""vLLM's own sweep over servers with and without trees, by the command of the page."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import METHODS, target_path
from tests.e2e.serve.doc_commands import commands_of
from vllm_specplug.bench.server import free_port

# One worker: servers of two workers would take each other's memory.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.xdist_group("bench")]

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "benchmarks.md"
PROMPTS = ("What is the capital of France?", "List three fruits.", "Repeat: one two three four.")


def test_the_sweep_of_the_page_measures_trees_and_plain_decoding(tmp_path: Path) -> None:
    servers, loads = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL))
    (command,) = (line for line in commands_of(PAGE) if line.startswith("vllm bench sweep serve "))
    servers = {name: servers[name] for name in ("plain", "trees")}
    servers["trees"]["speculative_config"]["model"] = str(METHODS["jetspec"]["model"])
    loads = [{**loads[0], "num_prompts": 3}]
    (tmp_path / "servers.json").write_text(json.dumps(servers))
    (tmp_path / "loads.json").write_text(json.dumps(loads))
    rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    port = f" --port {free_port()}"
    words = [
        word.replace("MODEL", target_path()) + port * (" --" in word)
        for word in shlex.split(command.replace("\\\n", ""))
    ]
    serve = words.index("--serve-cmd") + 1
    words[serve] += " --enforce-eager --dtype float32 --max-model-len 1024"
    words[words.index("--num-runs") + 1] = "1"
    words[words.index("--warmup-num-prompts") + 1] = "0"
    folder = Path(sys.executable).parent
    env = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    with (tmp_path / "results" / "first" / "summary.csv").open() as stream:
        measured = list(csv.DictReader(stream))
    assert [row["_benchmark_name"] for row in measured] == list(servers)
    for row in measured:
        assert int(row["completed"]) == len(PROMPTS) and float(row["median_e2el_ms"]) > 0
    plain, trees = (row["spec_decode_acceptance_length"] for row in measured)
    assert plain == "" and float(trees) > 1
