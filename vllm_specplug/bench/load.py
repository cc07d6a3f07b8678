# SPDX-License-Identifier: Apache-2.0
"""One run of `vllm bench serve` against a running server."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.bench.counters import SpecCounters
from vllm_specplug.bench.server import VllmServer, vllm_program
from vllm_specplug.provenance import tidy

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
_KEPT = (
    "completed", "duration", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "max_concurrent_requests",
    *(f"mean_{name}_ms" for name in LATENCIES),
    *(f"p{percent}_{name}_ms" for name in LATENCIES for percent in PERCENTILES),
)  # fmt: skip


class LoadError(RuntimeError):
    """The load tool or requests failed; the message has the end of the tool's output."""


@dataclass(frozen=True)
class Level:
    """How requests arrive: at `rate` requests per second in a Poisson process, with `concurrency`
    requests always in flight, or without either all at once."""

    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        assert self.rate is None or self.concurrency is None

    @property
    def key(self) -> str:
        """Its name in result files."""
        if self.rate is not None:
            return f"rate={self.rate:g}"
        return "burst" if self.concurrency is None else f"concurrency={self.concurrency}"

    @property
    def label(self) -> str:
        """Its name in tables."""
        if self.rate is not None:
            return f"{self.rate:g}/s"
        if self.concurrency is None:
            return "all at once"
        return f"{self.concurrency} at a time"

    @property
    def order(self) -> tuple[int, float]:
        """Its order in tables: idle, rates, all at once, then numbers in flight."""
        if self.concurrency is not None:
            return (0, 0.0) if self.concurrency == 1 else (3, self.concurrency)
        return (2, 0.0) if self.rate is None else (1, self.rate)

    def arguments(self) -> list[str]:
        """Returns its options of `vllm bench serve`."""
        if self.rate is not None:
            return ["--request-rate", f"{self.rate:g}"]
        return [] if self.concurrency is None else ["--max-concurrency", str(self.concurrency)]


IDLE = Level(concurrency=1)
BURST = Level()


@dataclass(frozen=True)
class Traffic:
    """Settings of all runs of a comparison."""

    output_len: int
    temperature: float = 0.0
    ignore_eos: bool = False
    chat: bool = True
    goodput: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Returns its options of `vllm bench serve`."""
        args = ["--custom-output-len", str(self.output_len)]
        args += ["--temperature", f"{self.temperature:g}"]
        args += ["--ignore-eos"] if self.ignore_eos else []
        args += [] if self.chat else ["--skip-chat-template"]
        return [*args, "--goodput", *self.goodput] if self.goodput else args


@dataclass(frozen=True)
class LoadRun:
    """Results of a run."""

    measured: dict[str, Any]
    """With the names of `vllm bench serve`: durations in seconds, latencies in milliseconds."""
    counters: SpecCounters
    """The server's counters of the run."""
    command: str

    def to_json(self) -> dict[str, Any]:
        """Returns the results as plain data."""
        return {**self.measured, "spec": self.counters.to_json(), "command": self.command}


def run_load(
    server: VllmServer,
    prompts: Sequence[str],
    level: Level,
    traffic: Traffic,
    *,
    seed: int = 0,
    timeout_s: float | None = None,
) -> LoadRun:
    """Sends `prompts` at a load and waits for all answers.

    Args:
        seed: seed of the arrival times.
        timeout_s: longest duration, in case an engine hangs.

    Raises:
        LoadError: if the tool fails or takes too long, or a request is not answered.
    """
    with tempfile.TemporaryDirectory(prefix="specplug-bench-") as folder:
        dataset, result = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        options = ["--num-prompts", str(len(prompts)), "--seed", str(seed)]
        options += [*level.arguments(), *traffic.arguments()]
        arguments = bench_arguments(server, dataset, result, options)
        before = _counters(server)
        try:
            done = subprocess.run(
                [*vllm_program(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise LoadError(
                f"{server.spec.name} did not answer {len(prompts)} requests ({level.label}) within "
                f"{timeout_s:.0f} s; see its log: {server.log_path}"
            ) from None
        if done.returncode != 0 or not result.is_file():
            raise LoadError(
                f"vllm bench serve against {server.spec.name} failed (exit {done.returncode}):\n"
                + "\n".join(done.stdout.splitlines()[-15:])
            )
        found = json.loads(result.read_text())
    if found.get("completed") != len(prompts):
        reasons = [line for line in done.stdout.splitlines() if line.startswith("Error ")]
        raise LoadError(
            f"{server.spec.name} answered {found.get('completed')} of {len(prompts)} requests; "
            f"see its log: {server.log_path}" + "".join(f"\n{line[:300]}" for line in reasons[:3])
        )
    counters = _counters(server) - before
    shown = ["vllm", *bench_arguments(server, Path("prompts.jsonl"), Path("result.json"), options)]
    return LoadRun({key: found.get(key) for key in _KEPT}, counters, tidy(shlex.join(shown)))


def bench_arguments(
    server: VllmServer, dataset: Path, result: Path, options: Sequence[str]
) -> list[str]:
    """Returns the arguments of `vllm bench serve` for prompts in `dataset`."""
    args = ["bench", "serve", "--backend", "openai", "--base-url", server.base_url]
    args += ["--model", server.spec.model, "--dataset-name", "custom"]
    args += ["--dataset-path", str(dataset), "--disable-shuffle", *options]
    args += ["--percentile-metrics", ",".join(LATENCIES)]
    args += ["--metric-percentiles", ",".join(map(str, PERCENTILES))]
    args += ["--ready-check-timeout-sec", "0", "--disable-tqdm"]
    return [*args, "--save-result", "--result-dir", str(result.parent), "--result-filename",
            result.name]  # fmt: skip


def _counters(server: VllmServer) -> SpecCounters:
    try:
        return SpecCounters.parse(server.metrics_text())
    except (urllib.error.URLError, OSError) as error:
        raise LoadError(f"{server.spec.name} does not answer: {error}") from error
