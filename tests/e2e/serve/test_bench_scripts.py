# SPDX-License-Identifier: Apache-2.0
"""The benchmark scripts' runner on real engines: side by side, lossless, continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import make_target

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[3]
# A script like those of bench/, on a random target.
SCRIPT = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "bench")!r}]
import vllm_specplug.targets as targets
from harness import Benchmark
from interleave import Load

target = sys.argv.pop(1)
targets.prepare_target = lambda name: target
benchmark = Benchmark("tiny", "A tiny benchmark.")
benchmark.add_comparison_flags(minutes=5.0, rounds=1, tokens=24)
args = benchmark.parse()
prompts = [[5, 6, 7, 8, 9] * 4, [11, 12, 13] * 5, [21, 22] * 6, list(range(30, 50))]
benchmark.compare(
    args,
    {{"plain": None, "ngram_tree": {{"method": "ngram_tree", "num_speculative_tokens": 8}}}},
    lambda target: [Load("2 at once", number, prompts, 2) for number in range(args.rounds)],
    engine={{"dtype": "float32", "max_model_len": 256, "max_num_seqs": 2,
             "skip_tokenizer_init": True}},
    sampling={{"max_tokens": args.tokens, "ignore_eos": True}},
)
"""


def run(folder: Path, *flags: str) -> list[dict[str, Any]]:
    """Runs the script; returns its cells."""
    command = [sys.executable, "-c", SCRIPT, str(folder / "target"), "--out", str(folder)]
    command += ["--data", str(folder / "prompts.jsonl"), "--allow-changes", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (folder / "tiny_cells.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line]


def test_engines_serve_side_by_side_and_a_run_continues(tmp_path: Path) -> None:
    make_target(tmp_path / "target", 340)
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    cells = run(tmp_path)
    assert [cell["key"] for cell in cells] == [
        ["plain", "2 at once", 0], ["ngram_tree", "2 at once", 0],
    ]  # fmt: skip
    plain, tree = cells
    for cell in cells:
        assert cell["tokens"] == 12 + 19 + 15 + 22 and cell["same_as_plain"] == cell["prompts"] == 4
        assert cell["tokens_per_s"] == pytest.approx(cell["tokens"] / cell["seconds"])
        assert 0 < cell["decode_tokens"] < cell["tokens"]
        assert 0 < cell["decode_seconds"] < cell["seconds"] and cell["step_ms"] > 0
        assert cell["decode_steps"] == 2 * cell["steps"], "two requests at once in every step"
        assert cell["provenance"]["execution"] == "compiled"
    assert plain["decode_tokens"] == plain["decode_steps"]
    assert plain["drafts"] == 0 and plain["draft_ms"] is None
    assert 0 < tree["accepted"] <= tree["nodes"] and tree["draft_ms"] > 0

    again = run(tmp_path, "--rounds", "2")
    assert again[:2] == cells, "what was measured stays"
    assert [cell["key"][2] for cell in again[2:]] == [1, 1]
    assert run(tmp_path, "--rounds", "2") == again, "nothing is left to measure"
