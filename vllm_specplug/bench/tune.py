# SPDX-License-Identifier: Apache-2.0
"""Search of tree settings by measuring: many shortly, the best longer (successive halving, Jamieson
and Talwalkar 2016)."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_specplug.bench.cells import MIX, Cell
from vllm_specplug.bench.load import Level
from vllm_specplug.bench.plan import AUTO, BenchPlan, ServerEntry
from vllm_specplug.bench.sweep import Sweep
from vllm_specplug.options import tree_option_names
from vllm_specplug.registry import get_method

# Values of each option, the default first.
AXES: dict[str, tuple[Any, ...]] = {
    "num_speculative_tokens": (16, 8, 32, 4),
    "ngram_topk": (3, 0),
    "tree_width": (8, 1, 3),
    "tree_depth": (None, 4),
    "tree_budget": (AUTO, "fixed"),
}
_LETTERS = {"ngram_topk": "k", "tree_width": "w", "tree_depth": "d"}
MAX_CANDIDATES = 27
KEPT_SHARE = 3
"""Each round keeps one in this many settings for the next round."""
FIRST_REQUESTS, MAX_REQUESTS = 6, 54
"""Requests of a run in the first round, and their limit. Each round multiplies by KEPT_SHARE."""
_TIME_SHARE = 0.6
"""Share of the remaining time that a round may take if another one follows."""


@dataclass(frozen=True)
class Trial:
    """A setting and its last round."""

    name: str
    config: dict[str, Any]
    round: int
    speed_up: float
    """Geometric mean over loads of the ratio of tokens/s to plain vLLM in the same round."""
    tokens_per_s: tuple[float, ...]
    mean_acceptance_length: float | None


@dataclass
class TuneOutcome:
    """The result of tuning."""

    levels: tuple[Level, ...]
    trials: list[Trial] = field(default_factory=list)
    """The last trial of each setting, best first."""
    failures: dict[str, str] = field(default_factory=dict)
    num_untried: int = 0

    @property
    def best(self) -> Trial | None:
        """The fastest setting of the last round; None if it is not faster than plain vLLM."""
        return self.trials[0] if self.trials and self.trials[0].speed_up > 1.0 else None

    def best_json(self) -> str:
        """Its --speculative-config."""
        assert self.best is not None
        return json.dumps(self.best.config)

    def advice(self) -> str:
        """Returns the recommendation in words."""
        loads = " and ".join(level.label for level in self.levels)
        notes = [f"{name} failed: {text.splitlines()[0]}" for name, text in self.failures.items()]
        if self.num_untried:
            notes.append(f"{self.num_untried} settings were not tried: time was up")
        if not self.trials:
            notes.append("nothing was measured: allow more --minutes")
        elif self.best is None:
            first = self.trials[0]
            notes.append(
                f"no setting was faster than plain vLLM with {loads}: serve without speculation "
                f"(the best was {first.name}, {first.speed_up:.2f} x)"
            )
        else:
            notes.append(
                f"fastest with {loads}: {self.best.name}, {self.best.speed_up:.2f} x plain vLLM. "
                "For --speculative-config:"
            )
        return "\n".join(notes)


def candidates(method: str, head: str | None) -> list[ServerEntry]:
    """Returns the settings to try: the default, then those that differ in one value, then in two.

    Raises:
        ValueError: if the method needs a head and there is none.
    """
    info = get_method(method)
    if info.needs_head and head is None:
        raise ValueError(f"method {method!r} needs a draft head: add --head.")
    axes = {name: values for name, values in AXES.items()
            if name == "num_speculative_tokens" or name in tree_option_names()}  # fmt: skip
    if not info.needs_head:
        # Without a head, all drafts are n-grams.
        axes["ngram_topk"] = (3, 2, 6)
    found = []
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        changes = sum(value != axes[name][0] for name, value in settings.items())
        depth = settings.get("tree_depth")
        if depth is None or depth < settings["num_speculative_tokens"]:
            found.append((changes, settings))
    found.sort(key=lambda pair: pair[0])  # stable: the order of the axes decides among equals
    return [_entry(method, head if info.needs_head else None, axes, settings)
            for _, settings in found[:MAX_CANDIDATES]]  # fmt: skip


def _entry(
    method: str, head: str | None, axes: dict[str, tuple[Any, ...]], settings: dict[str, Any]
) -> ServerEntry:
    nodes = settings["num_speculative_tokens"]
    parts = [method, str(nodes)]
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": nodes}
    if head is not None:
        config["model"] = head
    for name, letter in _LETTERS.items():
        if name in settings and settings[name] != axes[name][0]:
            config[name] = settings[name]
            parts.append(f"{letter}{settings[name]}")
    if settings.get("tree_budget") == "fixed":
        config["tree_budget"] = nodes
        parts.append("fixed")
    return ServerEntry(name="-".join(parts), speculative_config=config)


class Tuner:
    """Rounds of measurements, each with fewer settings and more requests.

    A round is a sweep, so interrupted tuning can continue. Plain vLLM is then measured again, and
    each setting keeps its own baseline.
    """

    def __init__(
        self, plan: BenchPlan, method: str, out: Path, log_folder: Path, console: Console
    ) -> None:
        """
        Args:
            plan: model, data and loads (`concurrency`).

        Raises:
            ValueError: if the method is unknown, or needs a head and there is none.
        """
        assert plan.concurrency, "no loads to tune for"
        self.plan = plan
        self.entries = candidates(method, plan.head)
        self.out = out
        self.log_folder = log_folder
        self.console = console

    def run(self, seconds: float) -> TuneOutcome:
        """Measures for `seconds`, and at most one server start and one run longer.

        Raises:
            ServerError, LoadError: if plain vLLM cannot be measured.
        """
        deadline = time.monotonic() + seconds
        levels = tuple(Level(concurrency=number) for number in self.plan.concurrency)
        outcome = TuneOutcome(levels)
        furthest: dict[str, Trial] = {}
        entries: Sequence[ServerEntry] = self.entries
        requests, number = FIRST_REQUESTS, 0
        while entries and time.monotonic() < deadline:
            last = len(entries) == 1 or requests >= MAX_REQUESTS
            share = 1.0 if last else _TIME_SHARE
            self._say(f"round {number + 1}: {len(entries)} settings, {requests} requests per run")
            plan = self.plan.model_copy(
                update={
                    "servers": (self.plan.baseline, *entries),
                    "min_requests": requests,
                    "max_requests": requests,
                }
            )
            sweep = Sweep(plan, self.out, self.log_folder, self.console, fresh_baseline=True)
            ended = sweep.run(share * (deadline - time.monotonic()))
            outcome.failures |= ended.failures
            trials = [
                t for e in entries if (t := self._trial(sweep, e, levels, number)) is not None
            ]
            if number == 0:
                outcome.num_untried = len(entries) - len(trials) - len(ended.failures)
            furthest |= {trial.name: trial for trial in trials}
            trials.sort(key=lambda trial: -trial.speed_up)
            if last or not trials:
                break
            kept = [t.name for t in trials[: math.ceil(len(trials) / KEPT_SHARE)]]
            entries = [entry for entry in entries if entry.name in kept]
            requests, number = min(MAX_REQUESTS, requests * KEPT_SHARE), number + 1
        outcome.trials = sorted(furthest.values(), key=lambda t: (-t.round, -t.speed_up))
        return outcome

    def _trial(
        self, sweep: Sweep, entry: ServerEntry, levels: Sequence[Level], number: int
    ) -> Trial | None:
        """Returns a setting's results of a round; None if a load has no result."""
        rows = [sweep.result(Cell(entry.name, MIX, level)) for level in levels]
        pairs = [
            (row["output_throughput"], row["plain_output_throughput"])
            for row in rows
            if row and row.get("plain_output_throughput")
        ]
        if len(pairs) < len(levels):
            return None
        specs = [row["spec"] for row in rows if row and row["spec"]]
        drafts = sum(spec["drafts"] for spec in specs)
        accepted = sum(spec["accepted_tokens"] for spec in specs)
        return Trial(
            name=entry.name,
            config=dict(entry.speculative_config or {}),
            round=number,
            speed_up=math.exp(sum(math.log(a / b) for a, b in pairs) / len(pairs)),
            tokens_per_s=tuple(a for a, _ in pairs),
            mean_acceptance_length=1.0 + accepted / drafts if drafts else None,
        )

    def _say(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)


def tuning_table(outcome: TuneOutcome) -> Table:
    """Returns a table of all trials, the recommended one first."""
    table = Table(title="settings tried", title_justify="left")
    table.add_column("setting", no_wrap=True)
    columns = ["rounds", "speed-up", *(f"tokens/s, {level.label}" for level in outcome.levels)]
    for column in [*columns, "length"]:
        table.add_column(column, justify="right")
    for trial in outcome.trials:
        length = trial.mean_acceptance_length
        table.add_row(
            trial.name,
            str(trial.round + 1),
            f"{trial.speed_up:.2f} x",
            *(f"{value:.1f}" for value in trial.tokens_per_s),
            "-" if length is None else f"{length:.2f}",
            style="bold" if trial is outcome.best else None,
        )
    return table
