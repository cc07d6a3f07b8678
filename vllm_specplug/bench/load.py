# SPDX-License-Identifier: Apache-2.0
"""One run of `vllm bench serve` against a running server."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.bench.server import VllmServer, vllm_program

_KEPT = {
    "tokens_per_s": "output_throughput",
    "seconds": "duration",
    "output_tokens": "total_output_tokens",
    "median_ttft_ms": "median_ttft_ms",
    "median_tpot_ms": "median_tpot_ms",
    "drafts": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_draft_tokens",
    "accepted_tokens": "spec_decode_accepted_tokens",
}


class LoadError(RuntimeError):
    """The load tool failed, or requests did; the message carries the end of its output."""


@dataclass(frozen=True)
class LoadRun:
    """What one run measured. The speculative counts are None without speculation."""

    tokens_per_s: float
    seconds: float
    output_tokens: int
    median_ttft_ms: float
    median_tpot_ms: float
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None when nothing was drafted."""
        if not self.drafts or self.accepted_tokens is None:
            return None
        return 1.0 + self.accepted_tokens / self.drafts

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_result(cls, result: dict[str, Any]) -> LoadRun:
        """Picks what we keep from the result file of `vllm bench serve`."""
        return cls(**{ours: result.get(theirs) for ours, theirs in _KEPT.items()})


def bench_arguments(
    server: VllmServer,
    dataset: Path,
    num_prompts: int,
    concurrency: int,
    output_len: int,
    result: Path,
) -> list[str]:
    """Arguments of `vllm bench serve` for greedy chats read from `dataset`."""
    args = ["bench", "serve", "--backend", "openai", "--base-url", server.base_url]
    args += ["--model", server.spec.model, "--dataset-name", "custom"]
    args += ["--dataset-path", str(dataset), "--disable-shuffle"]
    args += ["--num-prompts", str(num_prompts), "--custom-output-len", str(output_len)]
    args += ["--max-concurrency", str(concurrency), "--temperature", "0"]
    args += ["--ready-check-timeout-sec", "0", "--disable-tqdm"]
    args += ["--save-result", "--result-dir", str(result.parent)]
    return [*args, "--result-filename", result.name]


def run_load(
    server: VllmServer, prompts: Sequence[str], *, concurrency: int, output_len: int
) -> LoadRun:
    """Sends `prompts` as greedy chats, at most `concurrency` at once, and waits for all.

    Raises:
        LoadError: when the tool fails or not every request is answered.
    """
    with tempfile.TemporaryDirectory(prefix="specplug-bench-") as folder:
        dataset, result = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        arguments = bench_arguments(server, dataset, len(prompts), concurrency, output_len, result)
        done = subprocess.run(
            [*vllm_program(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        if done.returncode != 0 or not result.is_file():
            raise LoadError(
                f"vllm bench serve against {server.spec.name} failed (exit {done.returncode}):\n"
                + "\n".join(done.stdout.splitlines()[-15:])
            )
        measured = json.loads(result.read_text())
    if measured.get("completed") != len(prompts):
        raise LoadError(
            f"{server.spec.name} answered {measured.get('completed')} of {len(prompts)} requests; "
            f"see its log: {server.log_path}"
        )
    return LoadRun.from_result(measured)
