# SPDX-License-Identifier: Apache-2.0
"""What each part of the adaptive budget brings: simulated serving with all parts and without each.

    python bench/budget_parts.py [--minutes 10] [--seeds 4] [--processes 1]

Texts, drafts and a machine are those of tests/unit/budget/simulation.py, with times measured for a
small model on one core; no model runs. All sides answer the same requests, so that differences are
far smaller than what requests differ by. Started again it goes on where it stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from harness import RESULTS, ROOT, Benchmark

sys.path.append(str(ROOT))

from tests.unit.budget.simulation import DEPTH, NODES, Machine, Request, Server
from vllm_specplug.bench.cells import CellStore, digest
from vllm_specplug.bench.provenance import code_fingerprint
from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.budget import AdaptiveBudget, RowBudget, StepCostModel, acceptance, draft_gate
from vllm_specplug.budget.acceptance import AcceptanceModel
from vllm_specplug.budget.cost_curve import CostCurve
from vllm_specplug.budget.draft_gate import DraftGate, GateDecision
from vllm_specplug.tree import DraftTree

LOADS = (1, 4, 8, 16)
SHARED = "all parts"

# Layers and LM head of SmolLM2-135M by rows on one core, with packed products and with vLLM's, as
# in results/packed_products.md; the rest of a step is what a plain one takes beside them.
ROWS = (1.0, 4.0, 8.0, 12.0, 14.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0)
PACKED = (9.1, 9.1, 9.1, 9.3, 10.3, 11.4, 16.4, 21.1, 30.8, 39.8, 75.2, 147.2)
DEAR = (10.0, 10.4, 12.9, 15.4, 16.9, 17.9, 22.7, 27.8, 36.5, 45.1, 81.2, 151.7)
MACHINE = Machine(
    rows=ROWS, times=PACKED, draft_ms=3.2, draft_row_ms=0.1, rest_ms=4.6, rest_request_ms=1.0,
    prompt_ms=0.0, context_ms=0.02, context_call_ms=0.4, tree_share=0.08, tree_rest_ms=1.5,
    noise=0.03,
)  # fmt: skip
DEAR_MACHINE = replace(MACHINE, times=DEAR)
BUSY = (1.3, 1.2, 1.2, 1.1, 1.05, 1.05, 1.1, 1.2, 1.0, 1.0, 1.0, 1.0)
"""How much too long a busy machine measures at the start."""


@dataclass(frozen=True)
class Phase:
    """The machine and the texts for a while."""

    machine: Machine
    shift: int = 0


@dataclass(frozen=True)
class Scenario:
    """What is served.

    `error` is that of the calibration, `uneven` the standard deviation, over requests, of the
    logarithm of how much too sure or too modest their drafts' scores are, `lookups` the share of
    steps in which a request's text recurs. `only` names the parts to do without, where those are
    not all.
    """

    phases: tuple[Phase, ...]
    error: tuple[float, ...] = ()
    uneven: float = 0.0
    lookups: float = 0.3
    only: tuple[str, ...] = ()


SCENARIOS = {
    "steady": Scenario((Phase(MACHINE),)),
    "changing": Scenario(
        (Phase(MACHINE), Phase(DEAR_MACHINE, -3), Phase(MACHINE, 1), Phase(MACHINE, -3)), BUSY
    ),
    "misleading": Scenario(
        (Phase(DEAR_MACHINE, -6), Phase(MACHINE)),
        tuple(1.6 if rows <= 16 else 1.0 for rows in ROWS),
        uneven=0.5,
    ),
    "long prompts": Scenario(
        (Phase(replace(MACHINE, prompt_tokens=3000)),),
        only=("gate: some of the requests", "contexts that wait", "contexts: debts"),
    ),
    "useless at first": Scenario(
        (Phase(MACHINE, -9), Phase(MACHINE, 2)),
        lookups=0.0,
        only=("acceptance: table", "gate: factors of requests", "gate: probes"),
    ),
    "interrupted": Scenario(
        (Phase(MACHINE),),
        tuple(1.6 if rows > 8 else 1.0 for rows in ROWS),
        only=(
            "costs: learnt while serving",
            "costs: other sizes to measure",
            "costs: changes measured again soon",
            "gate: lookups apart",
        ),
    ),
}

Patch = tuple[Any, str, Any]


class UnevenRequest(Request):
    """A request whose drafts have scores `sureness` times as far from certainty as others'."""

    sureness = 1.0

    def draft(self) -> tuple[DraftTree, list[int | None]]:
        tree, truth = super().draft()
        return replace(tree, scores=(tree.scores * self.sureness).astype(np.float32)), truth


class UnevenServer(Server):
    """A server of `UnevenRequest`."""

    uneven = 0.0

    def _new_request(self) -> Request:
        request = super()._new_request()
        own = UnevenRequest(**{f.name: getattr(request, f.name) for f in fields(request)})
        own.sureness = float(np.exp(self.uneven * own.rng.standard_normal()))
        return own


@dataclass(frozen=True)
class Part:
    """How to do without a part of the budget."""

    patches: tuple[Patch, ...] = ()
    prepare: Callable[[AdaptiveBudget], None] | None = None
    server: Mapping[str, Any] | None = None


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _prior_table(self: AcceptanceModel) -> None:
    self._table = np.tile(acceptance._PRIOR, (acceptance._ROWS, 1))


def _all_in_full(
    self: DraftGate, slots: np.ndarray, limits: np.ndarray, *_: Any, **__: Any
) -> GateDecision:
    self.is_on = True
    return GateDecision(limits.copy(), 1.1)


_observe = DraftGate.observe


def _observe_population(self: DraftGate, *arguments: Any) -> None:
    _observe(self, *arguments)
    self._found[:] = self._expected[:] = draft_gate._REQUEST_PRIOR


_observe_verify, _observe_rest = StepCostModel.observe_verify, StepCostModel.observe_rest


def _observe_all_verify(self: StepCostModel, *times: Any, has_trees: bool = False) -> None:
    _observe_verify(self, *times)


def _observe_all_rest(self: StepCostModel, milliseconds: float, *, has_trees: bool = False) -> None:
    _observe_rest(self, milliseconds)


def _no_hints(owners: np.ndarray, num_reqs: int) -> np.ndarray:
    return np.zeros(num_reqs, np.int64)


def _largest(values: set[int]) -> list[int]:
    return [max(values)]


def _only_deepest(budget: AdaptiveBudget) -> None:
    assert budget.gate is not None
    budget.gate._depth_options = np.array([budget.gate.deepest])


def _same_score(scores: Any, depths: Any) -> Any:
    return _position(scores, np.ones_like(depths))


_position = acceptance._position

PARTS = {
    "costs: learnt while serving": Part(((CostCurve, "observe", _nothing),)),
    "costs: trees apart from rows": Part(
        (
            (StepCostModel, "observe_verify", _observe_all_verify),
            (StepCostModel, "observe_rest", _observe_all_rest),
        )
    ),
    "costs: plain steps to measure": Part(((AdaptiveBudget, "_may_try_plain", lambda *_: False),)),
    "costs: other sizes to measure": Part(
        ((AdaptiveBudget, "_trial", lambda self, rows, best, *_: best),)
    ),
    "costs: changes measured again soon": Part(((CostCurve, "is_surprising", lambda *_: False),)),
    "acceptance: table": Part(((AcceptanceModel, "_refresh", _prior_table),)),
    "acceptance: table by depth": Part(((acceptance, "_position", _same_score),)),
    "acceptance: table that forgets": Part(((acceptance, "_TABLE_DECAY", 1.0),)),
    "acceptance: offsets of requests": Part(((AcceptanceModel, "_observe_offsets", _nothing),)),
    "gate": Part(((DraftGate, "decide", _all_in_full),)),
    "gate: histogram": Part(((DraftGate, "observe", _nothing),)),
    "gate: lookups apart": Part(((draft_gate, "_hints", _no_hints),)),
    "gate: factors of requests": Part(((DraftGate, "observe", _observe_population),)),
    "gate: some of the requests": Part(((draft_gate, "sorted", _largest),)),
    "gate: depths": Part(prepare=_only_deepest),
    "gate: margins": Part(((draft_gate, "TURN_ON", 1.0), (draft_gate, "STAY_ON", 1.0))),
    "gate: probes": Part(((draft_gate, "PROBE_SHARE", 0.0),)),
    "contexts that wait": Part(server={"waits": False}),
    "contexts: debts": Part(server={"tells_debts": False}),
    "pace weights": Part((("vllm_specplug.budget.pace", "PULL", 0.0),)),
    "the budget: 16 nodes always": Part(server={"budget": 16}),
}


@contextmanager
def without(part: Part) -> Iterator[None]:
    """The package without a part."""
    with ExitStack() as stack:
        for owner, name, value in part.patches:
            if isinstance(owner, str):
                stack.enter_context(patch(f"{owner}.{name}", value))
            else:
                stack.enter_context(patch.object(owner, name, value, create=name == "sorted"))
        yield


def served(scenario: str, load: int, seed: int, part: Part | None) -> dict[str, Any]:
    """Tokens per second over plain decoding, by phase, and the pace of every request."""
    chosen = SCENARIOS[scenario]
    # Each phase is shorter than a scenario of one, which needs no time to adapt.
    count = 16 + 4 * load if len(chosen.phases) == 1 else 6 + 2 * load
    part = part or Part()
    options = dict(part.server or {})
    budget: AdaptiveBudget | int = options.pop("budget", -1)
    first = chosen.phases[0].machine
    if budget == -1:
        costs = StepCostModel(first.calibration(chosen.error))
        budget = AdaptiveBudget(costs, RowBudget(NODES, 4096), DEPTH)
        if part.prepare is not None:
            part.prepare(budget)
    kind = UnevenServer if chosen.uneven else Server
    server = kind(budget, first, answer=96, seed=seed, lookups=chosen.lookups, **options)
    if isinstance(server, UnevenServer):
        server.uneven = chosen.uneven
    with without(part):
        server.answer_requests(load, load)  # a start that is not counted
        del server.paces[:]
        tokens, seconds, plain_seconds = 0.0, 0.0, 0.0
        for phase in chosen.phases:
            server.machine, server.shift = phase.machine, phase.shift
            before = len(server.ended)
            rate = server.answer_requests(load, count)
            emitted = sum(tokens for _, tokens in server.ended[before:])
            tokens += emitted
            seconds += emitted / rate
            plain_seconds += emitted * phase.machine.plain_ms(load) / load / 1e3
    return {"ratio": plain_seconds / seconds, "tokens": tokens, "paces": server.paces}


def cell(scenario: str, load: int, seed: int, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A measurement and its key."""
    found = served(scenario, load, seed, PARTS.get(name))
    paces = [round(pace, 4) for pace in found["paces"]]
    return (scenario, load, seed, name), {"ratio": round(found["ratio"], 5), "paces": paces}


def keys(seeds: int) -> list[tuple[str, int, int, str]]:
    return [
        (scenario, load, seed, name)
        for seed in range(seeds)
        for scenario in SCENARIOS
        for name in parts_of(scenario)
        for load in LOADS
    ]


def parts_of(scenario: str) -> tuple[str, ...]:
    return (SHARED, *(SCENARIOS[scenario].only or PARTS))


def measure(args: Any, store: CellStore, name: str) -> None:
    deadline = time.monotonic() + 60 * args.minutes
    todo = [key for key in keys(args.seeds) if store.get(name, key) is None]
    with ProcessPoolExecutor(args.processes) as pool:
        waiting = set()
        while (todo or waiting) and time.monotonic() < deadline:
            while todo and len(waiting) < 2 * args.processes:
                waiting.add(pool.submit(cell, *todo.pop(0)))
            done = next(as_completed(waiting))
            waiting.remove(done)
            key, values = done.result()
            store.add(name, key, values)
        pool.shutdown(cancel_futures=True)
    if todo:
        print(f"out of time: run it again for the {len(todo)} cells left")


def make_page(args: Any, store: CellStore, name: str, record: Mapping[str, Any]) -> ResultPage:
    found = {tuple(row["key"]): row for row in store.rows(name)}
    complete = [
        seed
        for seed in range(args.seeds)
        if all(key in found for key in keys(args.seeds) if key[2] == seed)
    ]
    if not complete:
        raise SystemExit("no seed has all its cells: run it again")

    def slowest(scenario: str, load: int, part: str) -> float:
        paces = [p for seed in complete for p in found[scenario, load, seed, part]["paces"]]
        return float(np.percentile(paces, 1))

    data: dict[str, Any] = {"seeds": len(complete), "scenarios": {}}
    sections = []
    notes = {
        "steady": "The machine is as it was measured at the start, and the texts stay alike.",
        "changing": "Measured at the start while other work ran, up to 1.3 x too slow. Then, one "
        "after the other: as in the first table; rows that cost what vLLM's products take, and "
        "texts that are harder to draft; the first machine and texts that are easier; and harder "
        "texts again.",
        "misleading": "Small sizes were measured 1.6 x too slow. First rows cost what vLLM's "
        "products take and texts are much harder to draft, then both are as in the first table. "
        "Requests' scores are too sure or too modest, each by a factor of its own "
        "(standard deviation 0.5 of its logarithm).",
        "long prompts": "Prompts have 3000 tokens, else 200, which a head has to read.",
        "useless at first": "Hardly any draft is right, and then more than in the first table. "
        "No text recurs.",
        "interrupted": "Sizes of more than 8 rows were measured 1.6 x too slow.",
    }  # fmt: skip
    header = ["without", *(f"{load} at once" for load in LOADS)]
    for scenario in SCENARIOS:
        rows, slow = [], []
        values: dict[str, Any] = {}
        for part in parts_of(scenario):
            cells, tails, values[part] = [], [], {}
            for load in LOADS:
                ratios = np.array([found[scenario, load, s, part]["ratio"] for s in complete])
                base = np.array([found[scenario, load, s, SHARED]["ratio"] for s in complete])
                tail = slowest(scenario, load, part)
                change = 100 * (ratios / base - 1)
                values[part][load] = {
                    "over_plain": round(float(ratios.mean()), 4),
                    "change_percent": round(float(change.mean()), 2),
                    "changes_percent": [round(c, 2) for c in change.tolist()],
                    "slowest_hundredth": round(tail, 4),
                }
                if part == SHARED:
                    cells.append(f"{ratios.mean():.2f} x")
                    tails.append(f"{tail:.2f}")
                else:
                    spread = f"({change.min():+.1f}, {change.max():+.1f})"
                    cells.append(f"{change.mean():+.1f} {spread}")
                    tails.append(f"{tail:.2f}")
            label = part if part == SHARED else f"– {part}"
            rows.append([f"**{label}**" if part == SHARED else label, *cells])
            slow.append([f"**{label}**" if part == SHARED else label, *tails])
        data["scenarios"][scenario] = values
        sections.append(
            Section(header, rows, f"Throughput, {scenario}",
                    [notes[scenario] + " First row over plain decoding, others in percent of it."])
        )  # fmt: skip
        sections.append(
            Section(header, slow, f"Slowest hundredth of the requests, {scenario}",
                    ["Their tokens over those of plain decoding in the same time."])
        )  # fmt: skip
    return ResultPage(
        name="budget_parts",
        title="What each part of the adaptive budget brings",
        about=f"Simulated serving, {len(complete)} seeds, answers of 96 tokens, no prompts "
        "in the time: throughput without one part, as a change against all parts on the same "
        "requests: mean, and lowest and highest of the seeds. A change of both signs is none. What "
        "deciding itself takes, and times of other work, are not simulated.",
        sections=sections,
        data=data,
        made_by=[record],
    )


def main() -> None:
    benchmark = Benchmark("budget_parts", __doc__, runs_vllm=False)
    add = benchmark.parser.add_argument
    add("--minutes", type=float, default=10.0, help="start no cell after this long")
    add("--seeds", type=int, default=4)
    add("--processes", type=int, default=1)
    add("--report-only", action="store_true", help="make the page of what was measured")
    args = benchmark.parse()
    store = CellStore((args.out or RESULTS) / f"{benchmark.name}_cells.jsonl")
    simulation = ROOT / "tests" / "unit" / "budget" / "simulation.py"
    name = digest([code_fingerprint(None), simulation.read_text(), repr(MACHINE)])
    if args.report_only:
        name = store.latest_digest or name
    else:
        measure(args, store, name)
    benchmark.publish(args, make_page(args, store, name, benchmark.provenance(args)))


if __name__ == "__main__":
    main()
