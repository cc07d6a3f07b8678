# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.fakes import RECORD, FakeMachine, make_sweep
from vllm_specplug.bench.cells import MIX, Cell
from vllm_specplug.bench.load import BURST, IDLE, Level
from vllm_specplug.bench.summary import (
    crossover,
    csv_text,
    point,
    spec_facts,
    summarize,
    to_markdown,
    write_results,
)


def row(e2el: float, **values: Any) -> dict[str, Any]:
    return {"p50_e2el_ms": e2el, "p50_tpot_ms": e2el / 10, "p50_ttft_ms": 5.0, "completed": 4,
            "output_throughput": 1e3 / e2el, "load_average": 1.0, "duration": 2.0, "spec": {},
            **values}  # fmt: skip


def test_a_speed_up_is_the_median_of_ratios_in_the_same_repeat() -> None:
    cell = Cell("jetspec", MIX, IDLE)
    # The machine was twice as slow in the second repeat; the third has no baseline.
    found = point(cell, [row(50), row(100), row(1)], [row(100), row(200), None])
    assert found["speed_up"]["p50_e2el_ms"] == 2.0 and found["speed_up"]["range"] == [2.0, 2.0]
    assert found["speed_up"]["p50_tpot_ms"] == found["speed_up"]["output_throughput"] == 2.0
    assert found["p50_e2el_ms"] == 50.0 and found["repeats"] == 3 and found["requests"] == 12


def test_without_baseline_there_is_no_speed_up() -> None:
    assert point(Cell("x", MIX, IDLE), [row(50)], [None])["speed_up"]["p50_e2el_ms"] is None


def test_what_was_drafted() -> None:
    spec = {
        "drafts": 8.0,
        "draft_tokens": 96.0,
        "accepted_tokens": 12.0,
        "accepted_by_depth": [8.0, 4.0],
        "plain_steps": {"batch": 4.0},
        "draft_steps": 4.0,
        "draft_step_nodes": 96.0,
        "milliseconds": {"draft": 500.0, "verify": 1000.0},
    }
    more = spec | {"accepted_by_depth": [4.0], "accepted_tokens": 4.0}
    facts = spec_facts([row(1, spec=spec), row(1, spec=more)])
    assert facts is not None
    assert facts["mean_acceptance_length"] == 1 + 16 / 16
    assert facts["acceptance_by_depth"] == [12 / 16, 4 / 16]
    assert facts["nodes_per_draft"] == 12 and facts["nodes_per_request_step"] == 192 / 24
    assert facts["nodes_per_step"] == 24
    assert facts["share"] == {"draft": 0.25, "verify": 0.5, "compact": 0.0}
    assert spec_facts([row(1)]) is None
    # vLLM's own methods do not say how many requests decoded plainly.
    other = spec | {"plain_steps": {}, "draft_steps": 0.0, "draft_step_nodes": 0.0}
    facts = spec_facts([row(1, spec=other)])
    assert facts is not None and facts["nodes_per_draft"] == 12
    assert facts["nodes_per_request_step"] is None and facts["share"] is None


def test_steps_that_were_all_plain_have_a_budget_of_zero() -> None:
    spec = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0, "accepted_by_depth": [],
            "plain_steps": {"batch": 4.0}, "draft_steps": 0.0, "draft_step_nodes": 0.0,
            "milliseconds": {}}  # fmt: skip
    facts = spec_facts([row(1, spec=spec)])
    assert facts is not None and facts["nodes_per_request_step"] == 0
    assert facts["mean_acceptance_length"] is None and facts["acceptance_by_depth"] == []


def curve(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    found = []
    for x, speed_up in pairs:
        entry = point(Cell("s", MIX, Level(rate=x)), [row(1 / speed_up)], [row(1)])
        found.append(entry)
    return found


def test_crossover_lies_between_the_rates_around_it() -> None:
    found = crossover(curve((1.0, 1.5), (4.0, 0.5), (2.0, 1.5)), "s")
    # Half way between 2 and 4 requests/s, on a logarithmic axis.
    assert found["rate"] == pytest.approx(math.sqrt(8.0)) and found["text"] == "2.83/s"


@pytest.mark.parametrize(
    ("e2el", "throughput", "text"),
    [
        (1.1, 1.2, "none up to 2/s"),
        (1.1, 0.96, "past 2/s"),
        (0.9, 1.1, "past 2/s"),
        (0.998, 0.998, "none up to 2/s"),
        (None, None, "none up to 2/s"),
    ],
)
def test_crossover_lies_past_the_rates_where_saturation_is_slower(
    e2el: float | None, throughput: float | None, text: str
) -> None:
    burst = point(Cell("s", MIX, BURST), [row(1)], [row(1)])
    burst["speed_up"] |= {"p50_e2el_ms": e2el, "output_throughput": throughput}
    found = crossover([*curve((1.0, 1.5), (2.0, 1.01)), burst], "s")
    assert (found["rate"], found["at_burst"], found["text"]) == (None, e2el, text)


def test_crossover_in_words_where_there_is_none() -> None:
    assert crossover(curve((1.0, 1.5), (2.0, 1.01)), "s")["text"] == "none up to 2/s"
    assert crossover(curve((1.0, 0.9), (2.0, 1.5)), "s") == {
        "rate": None, "at_burst": None, "text": "slower from 1/s on",
    }  # fmt: skip
    assert crossover([], "s")["text"] == "not measured"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    FakeMachine(monkeypatch)
    sweep = make_sweep(
        tmp_path, servers="plain,suffix,jetspec-16", dataset_requests=4, goodput=["tpot:50"],
        head=f"{Path.cwd()}/heads/h",
    )  # fmt: skip
    sweep.run()
    return summarize(sweep, RECORD)


def test_results_of_a_sweep(results: dict[str, Any], tmp_path: Path) -> None:
    servers = {entry["name"]: entry for entry in results["servers"]}
    assert servers["jetspec-16"]["command"] == "vllm serve m --port 1"
    assert servers["suffix"]["failure"] == "needs arctic-inference"
    assert results["provenance"]["command"] == "specplug bench --data data"
    assert str(Path.cwd()) not in json.dumps(results)
    idle = [p for p in results["points"] if p["level"] == "concurrency=1"]
    assert len({p["x"] for p in idle}) == 1 and idle[0]["x"] == pytest.approx(0.1914, rel=1e-3)
    assert idle[1]["speed_up"]["p50_e2el_ms"] > 2
    assert 1 < results["crossover"]["jetspec-16"]["rate"] < 4
    assert {p["prompts"] for p in results["points"]} == {"all", "a", "b"}
    write_results(results, tmp_path / "written")
    written = json.loads((tmp_path / "written" / "results.json").read_text())
    assert written == json.loads(json.dumps(results))


def test_csv_has_a_row_a_point(results: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(results))))
    assert len(rows) == len(results["points"])
    drafted = next(r for r in rows if r["server"] == "jetspec-16" and r["level"] == "burst")
    assert float(drafted["speed_up_p50_e2el_ms"]) < 1 < float(drafted["mean_acceptance_length"])
    assert len(drafted["acceptance_by_depth"].split()) == 7
    assert next(r for r in rows if r["server"] == "plain")["drafts"] == ""


def test_markdown_says_everything(results: dict[str, Any]) -> None:
    text = to_markdown(results)
    assert "| 1 at a time | plain |" in text and "| all at once | jetspec-16 |" in text
    assert "Mean acceptance length by data set" in text and "| jetspec-16 | 3.00 | 3.00 |" in text
    assert "Slower than plain vLLM from this rate on: suffix: not measured; jetspec-16: 2." in text
    assert "suffix: needs arctic-inference" in text
    assert "`specplug bench --data data`, commit 0123456789ab; a CPU, 2 logical CPUs" in text
