# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the benchmark scripts: flags, engines, resumable comparisons, pages."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from interleave import Load, Serving, confine_process, serve_alone, serve_side_by_side
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_specplug.bench.result_page import ResultPage
from vllm_specplug.provenance import (
    UncommittedChanges,
    code_fingerprint,
    provenance,
    require_committed,
    tidy,
)

ROOT = Path(__file__).resolve().parents[1]
HEADS = ROOT / "heads"
RESULTS = ROOT / "bench" / "results"
BASELINE = "plain"

Systems = Mapping[str, dict[str, Any] | None]
"""Speculative config by name; None for plain vLLM."""
Cells = list[dict[str, Any]]

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class Benchmark:
    """Flags, measurements and page of a script.

    Args:
        name: name of its results.
        doc: the script's docstring, whose first line is its description.
        runs_vllm: whether models run in vLLM, eager or compiled.
    """

    def __init__(self, name: str, doc: str | None, *, runs_vllm: bool = True) -> None:
        self.name = name
        self.runs_vllm = runs_vllm
        self.parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
        add = self.parser.add_argument
        add("--out", type=Path, default=RESULTS, help="folder of the results")
        add(
            "--name",
            default=name,
            help="name of their files (default: %(default)s)",
        )
        add("--allow-changes", action="store_true",
            help="measure uncommitted code; the results are marked")  # fmt: skip
        if runs_vllm:
            add("--eager", action="store_true",
                help="disable compilation, also for plain vLLM")  # fmt: skip

    def add_comparison_flags(self, minutes: float, rounds: int, tokens: int) -> None:
        """Adds the flags of `compare`, with their defaults."""
        add = self.parser.add_argument
        add("--data", type=Path, help="file or folder of prompts")
        add("--minutes", type=float, default=minutes, help="start no load after this time")
        add("--rounds", type=int, default=rounds)
        add("--report-only", action="store_true", help="make the page of existing results")
        add("--tokens", type=int, default=tokens, help="longest answer")

    def parse(self) -> argparse.Namespace:
        """Returns the flags; refuses uncommitted code without --allow-changes."""
        args = self.parser.parse_args()
        self.name = args.name
        if not getattr(args, "report_only", False):
            if getattr(args, "data", self) is None:
                self.parser.error("--data is missing: name a JSONL file of prompts or a folder")
            try:
                require_committed(args.allow_changes)
            except UncommittedChanges as error:
                self.parser.error(str(error))
        return args

    def provenance(self, args: argparse.Namespace) -> dict[str, Any]:
        """Returns the provenance of this run."""
        record = provenance(execution(args) if self.runs_vllm else None)
        for path in (value for value in vars(args).values() if isinstance(value, Path)):
            # Folders of prompts and results on this machine mean nothing to readers.
            if path.is_absolute() and not path.is_relative_to(ROOT):
                record["command"] = record["command"].replace(str(path), path.name)
        return record

    # Comparisons

    def compare(
        self,
        args: argparse.Namespace,
        systems: Systems,
        loads: Callable[[str], Sequence[Load]],
        *,
        engine: Mapping[str, Any],
        sampling: Mapping[str, Any],
        engine_of: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        own_engine: Callable[[str, str], Any] = lambda system, target: None,
    ) -> None:
        """Lets all systems serve all loads side by side, and writes each result.

        A second call continues, unless code, settings or systems have changed.

        Args:
            systems: include `BASELINE`.
            loads: makes the loads from the target's path.
            engine: arguments of vLLM's `LLM` in addition to those of `make_engine`.
            sampling: arguments of `SamplingParams`; greedy without a temperature.
            engine_of: more arguments of `LLM` for some systems, by name.
            own_engine: makes a system's engine from the target's path, or returns None for vLLM's.
        """
        confine_process()

        from vllm_specplug.targets import prepare_target

        deadline = time.monotonic() + 60 * args.minutes
        target = str(prepare_target("smollm2"))
        planned = loads(target)
        store = self._store(args)
        record = self.provenance(args)
        own = {system: dict(engine_of[system]) for system in systems if system in engine_of}
        name = digest(
            [
                execution(args),
                _settings(args),
                tidy(json.dumps([systems, engine, sampling, *([own] if own else [])])),
                sorted({code_fingerprint((s or {}).get("model")) for s in systems.values()}),
            ]
        )

        def has_results(load: Load) -> bool:
            return all(store.get(name, (s, load.name, load.round)) for s in systems)

        todo = [load for load in planned if not has_results(load)]
        if not todo:
            return
        from vllm import SamplingParams

        wanted = {"temperature": 0.0, **sampling, "detokenize": False}
        params = SamplingParams(**wanted)
        warm_params = SamplingParams(**{**wanted, "max_tokens": 24, "ignore_eos": True})
        # vLLM's ngram last: it imports numba, after which no other engine starts on a CPU.
        order = sorted(systems, key=lambda s: (systems[s] or {}).get("method") == "ngram")
        console = Console()
        with LoadProgress(console, len(planned), len(planned) - len(todo)) as progress:
            made = {}
            for system in order:
                progress.status(f"starting {system}")
                made[system] = own_engine(system, target) or make_engine(
                    systems[system],
                    eager=args.eager,
                    **{"model": target, **engine, **own.get(system, {})},
                )
            engines = {system: made[system] for system in systems}
            for system, llm in engines.items():
                progress.status(f"warming up {system}")
                serve_alone(Serving(llm, _warm_up(todo[0]), warm_params, "warm-up"))
            for number, load in enumerate(todo):
                if time.monotonic() > deadline:
                    progress.say(
                        f"out of time: run it again for the {len(todo) - number} loads left"
                    )
                    return
                progress.status(f"{load.name}, round {load.round + 1}")
                servings = {
                    s: Serving(llm, load, params, f"{number}") for s, llm in engines.items()
                }
                serve_side_by_side(list(servings.values()))
                plain = servings[BASELINE]
                for system, serving in servings.items():
                    same = sum(plain.answers[n] == ids for n, ids in serving.answers.items())
                    values = {
                        "system": system, "load": load.name, "round": load.round,
                        "temperature": params.temperature, **serving.result(),
                        "same_as_plain": same, "provenance": record,
                    }  # fmt: skip
                    store.add(name, (system, load.name, load.round), values)
                    speed_up = plain.seconds / serving.seconds
                    progress.say(
                        f"{load.name}, round {load.round + 1}, {system}: "
                        f"{values['tokens_per_s']:.1f} tokens/s, {speed_up:.2f} x plain"
                    )
                progress.advance(len(planned), len(planned) - len(todo) + number + 1)

    def cells(self, args: argparse.Namespace) -> Cells:
        """Returns the cells of the latest comparison."""
        store = self._store(args)
        if store.latest_digest is None:
            self.parser.exit(1, f"{store.path} holds no results\n")
        return store.rows(store.latest_digest)

    def _store(self, args: argparse.Namespace) -> CellStore:
        return CellStore(args.out / f"{self.name}_cells.jsonl")

    # Pages

    def publish(self, args: argparse.Namespace, page: ResultPage) -> None:
        """Writes the page and prints its text."""
        print(replace(page, name=self.name).write(args.out))


class CellStore:
    """Measured cells by key and by the digest of all settings that determine them, written at once
    into a JSONL file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                # A cell whose line was cut off is measured again.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    self._rows[(row["digest"], *row["key"])] = row

    def get(self, digest: str, key: Sequence[Any]) -> dict[str, Any] | None:
        """Returns a cell; None if it was not measured."""
        return self._rows.get((digest, *key))

    def rows(self, digest: str) -> list[dict[str, Any]]:
        """Returns the cells of a digest, in the order of their first measurement."""
        return [row for key, row in self._rows.items() if key[0] == digest]

    @property
    def latest_digest(self) -> str | None:
        """Digest of the last cell; None without cells."""
        return next(reversed(self._rows), (None,))[0]

    def add(self, digest: str, key: Sequence[Any], values: Mapping[str, Any]) -> None:
        """Records and writes a cell. It replaces an earlier one with the same key."""
        load_average = round(os.getloadavg()[0], 2)
        row = {"digest": digest, "key": list(key), "load_average": load_average, **values}
        self._rows[(digest, *key)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The leading line break ends a line that was cut off.
        with self.path.open("a") as stream:
            stream.write("\n" + json.dumps(row))


def digest(value: Any) -> str:
    """Returns a short digest of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


class LoadProgress:
    """A progress bar of loads on a terminal, otherwise one line per event; a context manager."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console = console
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total, completed=done)

    def __enter__(self) -> LoadProgress:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def advance(self, total: int, done: int) -> None:
        """Sets the number of finished loads."""
        self._progress.update(self._task, total=total, completed=done)

    def status(self, text: str) -> None:
        """Shows the current activity, on a terminal only."""
        self._progress.update(self._task, description=text[: max(20, self._console.width - 50)])

    def say(self, message: str) -> None:
        """Prints a message above the bar."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)


_NOT_IN_DIGEST = {"out", "name", "minutes", "rounds", "report_only", "allow_changes", "eager"}


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """Returns the flags that determine a cell, with a digest of the prompts."""
    values = {k: tidy(str(v)) for k, v in vars(args).items() if k not in _NOT_IN_DIGEST}
    files = sorted(args.data.glob("*.jsonl")) if args.data.is_dir() else [args.data]
    values["data"] = digest([file.read_text() for file in files])
    return values


def _warm_up(load: Load) -> Load:
    """Returns a load of six short requests, two at once."""
    prompts = [load.prompts[i % len(load.prompts)][:256] for i in range(6)]
    return replace(load, name="warm-up", prompts=prompts, concurrency=min(2, load.concurrency))


def by_load(cells: Cells) -> dict[str, dict[str, Cells]]:
    """Returns cells by load and system, in the order of rounds."""
    found: dict[str, dict[str, Cells]] = {}
    for cell in sorted(cells, key=lambda cell: cell["round"]):
        found.setdefault(cell["load"], {}).setdefault(cell["system"], []).append(cell)
    return found


def ratios(cells: Cells, others: Cells, value: Callable[[dict[str, Any]], float]) -> list[float]:
    """Returns the ratio of the value of `cells` to that of `others`, for each round of both."""
    by_round = {cell["round"]: cell for cell in others}
    return [value(c) / value(by_round[c["round"]]) for c in cells if c["round"] in by_round]


def latency_gains(cells: Cells, plain: Cells) -> dict[str, float | None]:
    """Returns how many times smaller median and 99th percentile of answers' times per output token
    are than plain decoding's ("tpot_gain", "tpot_p99_gain"), and the same over steps without
    prefill ("pace_gain", "pace_p99_gain"). Ratios are medians over rounds, None if a cell has no
    value."""
    gains: dict[str, float | None] = {}
    for name in ("tpot_ms", "tpot_p99_ms", "pace_ms", "pace_p99_ms"):
        known = all(cell[name] is not None for cell in (*cells, *plain))
        gain = name.replace("_ms", "_gain")
        gains[gain] = median(ratios(plain, cells, itemgetter(name))) if known else None
    return gains


def total(cells: Cells, name: str) -> float:
    return sum(cell[name] for cell in cells)


def decode_rate(cell: Mapping[str, Any]) -> float:
    """Returns tokens per second of the steps in which all concurrent requests were decoded."""
    return cell["decode_tokens"] / cell["decode_seconds"]


def execution(args: argparse.Namespace) -> str:
    """Returns how all engines of a comparison run the model."""
    return "eager" if args.eager else "compiled"


def make_engine(speculative: dict[str, Any] | None, *, eager: bool, **options: Any) -> Any:
    """Makes a vLLM engine; `speculative` is its speculative config, None for plain vLLM."""
    from vllm import LLM

    # A repeated prompt must cost as much as the first time.
    defaults = {"dtype": "bfloat16", "max_model_len": 2048, "enable_prefix_caching": False}
    if speculative is not None:
        options["speculative_config"] = dict(speculative)
    return LLM(enforce_eager=eager, disable_log_stats=False, **{**defaults, **options})
