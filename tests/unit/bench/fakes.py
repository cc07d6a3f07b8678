# SPDX-License-Identifier: Apache-2.0
"""A machine whose servers and load are arithmetic, so that sweeps take no time."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import vllm_specplug.bench.sweep as sweep_module
from vllm_specplug.bench.counters import SpecCounters
from vllm_specplug.bench.load import LATENCIES, PERCENTILES, Level, LoadError, LoadRun, Traffic
from vllm_specplug.bench.plan import make_plan
from vllm_specplug.bench.server import ServerError, ServerSpec
from vllm_specplug.bench.sweep import Sweep

TPOT_MS = 40.0
SLOTS = 16


def tokens_per_step(name: str) -> float:
    return {"plain": 1.0, "ngram": 2.0}.get(name, 3.0)


def step_ms(name: str, batch: float) -> float:
    """What a step costs: speculation verifies more rows, which hurts when the batch grows."""
    rows = {"plain": 1.0, "ngram": 6.0}.get(name, 12.0 if "auto" not in name else 12.0 / batch)
    return TPOT_MS * (1.0 + 0.02 * batch * rows)


def fake_run(name: str, level: Level, count: int, output_len: int) -> LoadRun:
    """A queue in equilibrium, as crude as it is smooth."""

    def tpot(batch: float) -> float:
        return step_ms(name, batch) / tokens_per_step(name)

    saturated = 1e3 * SLOTS / (output_len * tpot(SLOTS))
    if level.rate is not None:
        batch = min(SLOTS, max(1.0, level.rate * output_len * tpot(4.0) / 1e3))
        served = min(level.rate, saturated)
    else:
        batch = min(SLOTS, level.concurrency or SLOTS)
        served = 1e3 * batch / (output_len * tpot(batch))
    waiting = 20.0 * batch
    if level.rate is not None and level.rate > served:
        waiting += 500.0 * count * (1.0 / served - 1.0 / level.rate)
    e2el = waiting + tpot(batch) * output_len
    medians = {"ttft": waiting, "tpot": tpot(batch), "itl": step_ms(name, batch), "e2el": e2el}
    measured: dict[str, Any] = {
        "completed": count, "duration": count / served, "total_input_tokens": 20 * count,
        "total_output_tokens": output_len * count, "request_throughput": served,
        "request_goodput": served * (0.9 if waiting < 500 else 0.2),
        "output_throughput": served * output_len, "max_concurrent_requests": round(batch),
    }  # fmt: skip
    for latency in LATENCIES:
        measured[f"mean_{latency}_ms"] = medians[latency]
        for percent in PERCENTILES:
            measured[f"p{percent}_{latency}_ms"] = medians[latency] * (1 + (percent - 50) / 60)
    counters = SpecCounters()
    if name != "plain":
        steps = count * output_len / tokens_per_step(name)
        gained = tokens_per_step(name) - 1.0
        depths = {depth: steps * gained * 0.5**depth for depth in range(1, 8)}
        ours = name != "ngram"
        wall = 1e3 * count / served
        phases = {"draft": 0.2 * wall, "verify": 0.5 * wall, "compact": 0.01 * wall}
        counters = SpecCounters(
            drafts=steps, draft_tokens=steps * (12.0 if ours else 6.0),
            accepted_tokens=steps * gained, accepted_by_depth=depths,
            plain_steps={"batch": steps * batch / 8} if ours else {},
            draft_steps=steps / batch if ours else 0.0,
            draft_step_nodes=steps * 12.0 if ours else 0.0, milliseconds=phases if ours else {},
        )  # fmt: skip
    return LoadRun(measured, counters, f"vllm bench serve {level.key}")


class FakeMachine:
    """Stands in for servers and load; counts what is run, and can break in several ways."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[str, str, tuple[str, ...]]] = []
        self.started: list[ServerSpec] = []
        self.awake: set[str] = set()
        self.dead: set[str] = set()
        # Servers that never start, server and level at which one dies or refuses requests,
        # number of runs after which the user interrupts.
        self.broken: set[str] = set()
        self.die_at: tuple[str, str] | None = None
        self.refuse_at: tuple[str, str] | None = None
        self.interrupt_after: int | None = None
        machine = self

        class Server:
            def __init__(self, spec: ServerSpec, log_path: Path, port: int | None = None) -> None:
                self.spec, self.log_path, self.port = spec, log_path, port or 1

            def __enter__(self) -> Any:
                machine.started.append(self.spec)
                machine.awake.add(self.spec.name)
                return self

            def __exit__(self, *exc: object) -> None:
                machine.awake.discard(self.spec.name)

            def wait_healthy(self, timeout_s: float, progress: Any) -> float:
                if self.spec.name in machine.broken:
                    raise ServerError(f"vllm serve ({self.spec.name}) exited with status 1")
                machine.dead.discard(self.spec.name)
                return 1.0

            def complete(self, prompt: str, max_tokens: int) -> None:
                assert self.spec.name in machine.awake

            def pause(self) -> None:
                machine.awake.discard(self.spec.name)

            def resume(self) -> None:
                machine.awake.add(self.spec.name)

            def is_running(self) -> bool:
                return self.spec.name not in machine.dead

            def log_tail(self) -> str:
                return "EngineDeadError: out of memory"

        def load(
            server: Any, prompts: Any, level: Level, traffic: Traffic, *, seed: int, timeout_s: Any
        ) -> LoadRun:
            name = server.spec.name
            if machine.interrupt_after == len(machine.runs):
                raise KeyboardInterrupt
            assert machine.awake == {name}, "others must be paused or stopped"
            assert name not in machine.dead
            if machine.die_at == (name, level.key):
                machine.dead.add(name)
                raise LoadError(f"{name} answered 3 of 8 requests")
            if machine.refuse_at == (name, level.key):
                raise LoadError(f"{name} answered 3 of 8 requests")
            machine.runs.append((name, level.key, tuple(prompts)))
            return fake_run(name, level, len(prompts), traffic.output_len)

        monkeypatch.setattr(sweep_module, "VllmServer", Server)
        monkeypatch.setattr(sweep_module, "run_load", load)
        monkeypatch.setattr(sweep_module, "commit", lambda: "0123456789ab")
        monkeypatch.setattr(
            ServerSpec, "cannot_start",
            lambda self: "needs arctic-inference" if self.name == "suffix" else None,
        )  # fmt: skip
        monkeypatch.setattr(
            ServerSpec, "display", lambda self, port: f"vllm serve {self.model} --port {port}"
        )


def make_sweep(folder: Path, **values: Any) -> Sweep:
    """A sweep over two small data sets below `folder`, where its results go too."""
    for name in ("a", "b"):
        rows = [json.dumps({"prompt": f"{name}{i}"}) + "\n" for i in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    plan = make_plan(
        {"model": "m", "head": "h", "servers": "plain,ngram,jetspec-16", "data": folder} | values
    )
    out = folder / "out"
    return Sweep(plan, out, out, Console(file=io.StringIO(), width=200))


RECORD = {
    "command": f"specplug bench --data {Path.cwd()}/data",
    "commit": "0123456789ab",
    "versions": {"vllm": "0.32.0"},
    "hardware": {"cpu": "a CPU", "logical_cpus": 2, "extensions": ["avx2"], "memory_gib": 4.0,
                 "gpus": ["a GPU"]},
}  # fmt: skip
