# SPDX-License-Identifier: Apache-2.0
"""Servers measured on the same traffic, from idle to past saturation.

As in vLLM's `bench sweep serve_workload`, the ends of the range are measured and the loads between
are interpolated. vLLM does so for each server, in whole requests per second. Here all servers get
the rates found on plain vLLM, also below one request per second. Each point is one run of
`vllm bench serve`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vllm_specplug.bench.cells import MIX, Cell, CellStore, digest
from vllm_specplug.bench.load import BURST, IDLE, Level, LoadError, LoadRun, Traffic, run_load
from vllm_specplug.bench.plan import AUTO, BASELINE, BenchPlan, ServerEntry
from vllm_specplug.bench.progress import SweepProgress
from vllm_specplug.bench.prompts import load_sets, mixed_prompts
from vllm_specplug.bench.server import RunningServer, ServerError, ServerSpec, VllmServer
from vllm_specplug.provenance import code_fingerprint, commit, tidy

# Settings that select cells without changing them.
_NOT_IN_DIGEST = {
    "servers", "head", "data", "rates", "points", "concurrency", "repeats", "together",
    "dataset_requests",
}  # fmt: skip
OVERLOAD = 1.5
"""Highest rate of "auto", as a multiple of the baseline's saturated throughput."""
DATASET_CONCURRENCY = 4
WARMUP_REQUESTS = 4
START_TIMEOUT_S = 1800.0
RUN_TIMEOUT_S = 3600.0


class OutOfTime(Exception):
    """The time limit is reached."""


@dataclass
class Outcome:
    """How a sweep ended."""

    num_missing: int = 0
    """Runs of the plan without a result."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons of missing results, by server."""
    out_of_time: bool = False


def found_rates(serial_rate: float, saturated_rate: float, points: int) -> tuple[float, ...]:
    """Returns geometric steps from one request at a time to past saturation, three digits each.

    Args:
        serial_rate: requests/s of the baseline with one request at a time.
        saturated_rate: requests/s of the baseline with all requests at once.
    """
    low, high = serial_rate, saturated_rate * OVERLOAD
    if high <= low:  # a server that gains nothing from batches
        low = high / 2
    # The low end was measured, one request at a time.
    values = np.geomspace(low, high, points + 1)[1:]
    return tuple(dict.fromkeys(float(f"{value:.3g}") for value in values))


class Sweep:
    """Runs the missing cells of a plan and keeps their results."""

    def __init__(self, plan: BenchPlan, out: Path, log_folder: Path, console: Console) -> None:
        """Reads the data and earlier results; starts no server.

        Raises:
            ValueError: if the data cannot be read.
        """
        self.plan = plan
        self.console = console
        self.log_folder = log_folder
        self.sets = load_sets(plan.data, plan.max_prompt_chars)
        self.store = CellStore(out / "cells.jsonl")
        self.traffic = Traffic(
            plan.output_len, plan.temperature, plan.ignore_eos, plan.chat, plan.goodput
        )
        # Reasons of missing results, and of servers that cannot run here, by server.
        self.failures: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self._commit = commit()
        settings = plan.model_dump(mode="json", exclude=_NOT_IN_DIGEST)
        texts = [[prompt_set.name, *prompt_set.prompts] for prompt_set in self.sets]
        self._digests = {
            entry.name: digest(
                [
                    settings,
                    entry.model_dump(mode="json"),
                    texts,
                    code_fingerprint((entry.speculative_config or {}).get("model")),
                ]
            )
            for entry in plan.servers
        }
        for entry in plan.servers:
            reason = self.make_server(entry).spec.cannot_start()
            if reason is not None:
                self.skipped[entry.name] = reason

    def run(self, time_limit_s: float | None = None) -> Outcome:
        """Measures missing cells until the time limit.

        The outcome names servers that do not start or die; the others continue. Another call
        measures cells that are still missing.

        Raises:
            ServerError: if the baseline cannot be started.
            LoadError: if the baseline's first runs fail, so that no rates are found.
        """
        deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        others = self.store.count_others(set(self._digests.values()))
        if others:
            self._say(
                f"{others} earlier results in {self.store.path} were measured with other settings, "
                "prompts or code and are not used"
            )
        for name, reason in self.skipped.items():
            self._say(f"{name} is left out: {reason}")
        servers = self._servers
        groups = [servers] if self.plan.together else [(entry,) for entry in servers]
        outcome = Outcome()
        with SweepProgress(self.console, self.num_planned, self.num_done) as progress:
            try:
                for group in groups:
                    self._run_group(group, progress, deadline)
            except OutOfTime:
                outcome.out_of_time = True
        outcome.failures = dict(self.failures)
        outcome.num_missing = self.num_planned - self.num_done
        return outcome

    # Levels and cells

    @property
    def _servers(self) -> tuple[ServerEntry, ...]:
        """The servers that can run here, the baseline first."""
        return tuple(e for e in self.plan.ordered_servers if e.name not in self.skipped)

    def levels(self) -> tuple[Level, ...] | None:
        """Returns the loads of the mixed traffic in order; None while the rates are unknown.

        Rates come from the baseline's first repeat, so a continued sweep has the same.
        """
        plan = self.plan
        rates = plan.rates
        ends: tuple[Level, ...] = ()
        if rates == AUTO:
            ends = (IDLE, BURST)
            results = [self.result(Cell(BASELINE, MIX, level)) for level in ends]
            if None in results:
                return None
            serial, saturated = (float(row["request_throughput"]) for row in results if row)
            rates = found_rates(serial, saturated, plan.points)
        assert not isinstance(rates, str)
        loads = [Level(rate=rate) for rate in rates]
        loads += [Level(concurrency=number) for number in plan.concurrency]
        return tuple(dict.fromkeys((*ends, *loads)))

    def cells(self, server: str) -> list[Cell]:
        """Returns the cells of a server in order; while the rates are unknown, only those that
        determine them."""
        plan = self.plan
        levels = self.levels()
        found = [
            Cell(server, MIX, level, repeat)
            for repeat in range(plan.repeats)
            for level in (levels if levels is not None else (IDLE, BURST))
        ]
        if plan.dataset_requests:
            level = Level(concurrency=DATASET_CONCURRENCY)
            found += [Cell(server, prompt_set.name, level) for prompt_set in self.sets]
        return found

    @property
    def num_planned(self) -> int:
        """Number of runs of the plan."""
        plan = self.plan
        levels = self.levels()
        num_levels = len(levels) if levels is not None else 2 + plan.points + len(plan.concurrency)
        sets = len(self.sets) if plan.dataset_requests else 0
        return len(self._servers) * (num_levels * plan.repeats + sets)

    @property
    def num_done(self) -> int:
        """Number of runs with a result."""
        return sum(
            self.result(cell) is not None
            for entry in self._servers
            for cell in self.cells(entry.name)
        )

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """Returns the result of a cell; None without one."""
        row = self.store.get(self._digests[cell.server], cell.key)
        # The number of requests of a data set is not in the digest.
        other_count = row and cell.prompts != MIX and row["completed"] != self.plan.dataset_requests
        return None if other_count else row

    # Running

    def _run_group(
        self, group: Sequence[ServerEntry], progress: SweepProgress, deadline: float | None
    ) -> None:
        """Runs servers that are up together, cell by cell in turns; usually only one."""
        with contextlib.ExitStack() as stack:
            servers = {}
            for entry in group:
                if any(self.result(cell) is None for cell in self.cells(entry.name)):
                    _check_time(deadline)
                    server = self._start(entry, stack, progress)
                    if server is not None:
                        servers[entry.name] = server
                        if len(group) > 1:
                            server.pause()
            for place, names in enumerate(self._turns(tuple(servers))):
                shift = place % len(names)  # the first server rotates
                for cell in names[shift:] + names[:shift]:
                    server = servers.get(cell.server)
                    if server is None or self.result(cell) is not None:
                        continue
                    _check_time(deadline)
                    server.resume()
                    if not self._measure(server, cell, progress):
                        del servers[cell.server]
                    elif len(group) > 1:
                        server.pause()

    def _turns(self, names: tuple[str, ...]) -> Iterator[list[Cell]]:
        """Yields each cell of all servers. The rates of later cells depend on earlier results."""
        place = 0
        while names:
            turn = [cells[place] for name in names if place < len(cells := self.cells(name))]
            if not turn:
                return
            yield turn
            place += 1

    def _start(
        self, entry: ServerEntry, stack: contextlib.ExitStack, progress: SweepProgress
    ) -> VllmServer | None:
        """Starts and warms up a server; returns None if it does not start, unless it is the
        baseline."""
        server = self.make_server(entry)
        try:
            where = f"at {entry.url}" if entry.url else f"starting, log {server.log_path}"
            progress.say(f"{entry.name}: {where}")
            stack.enter_context(server)
            seconds = server.wait_healthy(
                START_TIMEOUT_S,
                lambda message: progress.status(f"{entry.name}: {message}"),
            )
            self._warm_up(server)
        except ServerError as error:
            if entry.name == BASELINE:
                raise
            self.failures[entry.name] = str(error)
            progress.say(f"{entry.name} is left out: {error}")
            return None
        progress.say(f"{entry.name}: answers after {seconds:.0f} s")
        return server

    def make_server(self, entry: ServerEntry) -> VllmServer:
        """Returns the server of `entry`, not started."""
        plan = self.plan
        spec = ServerSpec(
            name=entry.name,
            model=plan.model,
            speculative_config=entry.speculative_config,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            dtype=plan.dtype,
            enforce_eager=plan.enforce_eager,
            extra_args=(*plan.serve_args, *entry.serve_args),
        )
        if entry.url is not None:
            return RunningServer(spec, entry.url)
        return VllmServer(spec, self.log_folder / f"bench-{entry.name}.log")

    def _warm_up(self, server: VllmServer) -> None:
        """Sends unmeasured requests, one and then several at once."""
        sets = [prompt_set.prompts for prompt_set in self.sets]
        prompts = mixed_prompts(sets, 0, WARMUP_REQUESTS)
        server.complete(prompts[0], 16)
        with ThreadPoolExecutor(WARMUP_REQUESTS) as pool:
            list(pool.map(lambda prompt: server.complete(prompt, 16), prompts))

    def _measure(self, server: VllmServer, cell: Cell, progress: SweepProgress) -> bool:
        """Runs a cell; returns whether the server can continue."""
        progress.status(f"{cell.server}: {cell.level.label}, {cell.prompts}")
        try:
            run = self.load(server, cell)
        except LoadError as error:
            alive = server.is_running()
            what = str(error) if alive else f"died at {cell.level.label}: {server.log_tail()}"
            self.failures[cell.server] = what
            more = "its other loads follow" if alive else "what it has is kept"
            progress.say(f"{cell.server} {cell.level.label} FAILED ({more}): {what}")
            ends = cell.prompts == MIX and cell.level in (IDLE, BURST) and self.plan.rates == AUTO
            if cell.server == BASELINE and ends and self.levels() is None:
                raise
            return alive
        plain = self.result(replace(cell, server=BASELINE))
        values = {
            "rate": cell.level.rate,
            "concurrency": cell.level.concurrency,
            "commit": self._commit,
            "server": tidy(server.spec.display(server.port)),
            "plain_output_throughput": plain and plain["output_throughput"],
        }
        self.store.add(self._digests[cell.server], cell.key, {**values, **run.to_json()})
        progress.advance(self.num_planned, self.num_done)
        progress.say(_line(cell, run))
        return True

    def load(self, server: VllmServer, cell: Cell) -> LoadRun:
        """Sends the requests of a cell to `server`.

        All servers get the same prompts at the same times. Repeats get other prompts.
        """
        plan = self.plan
        if cell.prompts == MIX:
            count = plan.num_requests(cell.level.rate, cell.level.concurrency)
            sets = [prompt_set.prompts for prompt_set in self.sets]
        else:
            count = plan.dataset_requests
            sets = [next(s.prompts for s in self.sets if s.name == cell.prompts)]
        prompts = mixed_prompts(sets, cell.repeat * count, count)
        return run_load(
            server,
            prompts,
            cell.level,
            self.traffic,
            seed=cell.repeat,
            timeout_s=RUN_TIMEOUT_S,
        )

    def _say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)


def _check_time(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise OutOfTime


def _line(cell: Cell, run: LoadRun) -> str:
    length = run.counters.mean_acceptance_length
    return (
        f"{cell.server}, {cell.prompts}, {cell.level.label}: "
        f"{run.measured['output_throughput']:.1f} tokens/s, "
        f"TPOT {run.measured['p50_tpot_ms']:.1f} ms, E2E {run.measured['p50_e2el_ms']:.0f} ms"
        + (f", length {length:.2f}" if length else "")
    )
