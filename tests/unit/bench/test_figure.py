# SPDX-License-Identifier: Apache-2.0
"""The figure draws what was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.fakes import RECORD, FakeMachine, make_sweep
from vllm_specplug.bench.figure import PANELS, draw, write_figure
from vllm_specplug.bench.summary import summarize


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    FakeMachine(monkeypatch)
    sweep = make_sweep(
        tmp_path, servers="plain,ngram,suffix,jetspec-16", dataset_requests=4, concurrency=[4, 8]
    )
    sweep.run()
    return summarize(sweep, RECORD)


def lines(axis: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of each server's line; a gap is None."""
    return {
        str(line.get_label()): [
            None if math.isnan(y) else (float(x), float(y))
            for x, y in zip(*line.get_data(), strict=True)
        ]
        for line in axis.lines
        if not str(line.get_label()).startswith("_")
    }


def test_every_measured_server_is_drawn_by_rate(results: dict[str, Any]) -> None:
    figure = draw(results)
    assert figure is not None
    assert [axis.get_title() for axis in figure.axes] == list(PANELS)
    speed_up, per_token, _, nodes = (lines(axis) for axis in figure.axes)
    assert set(speed_up) == set(nodes) == {"ngram", "jetspec-16"}
    assert set(per_token) == {"plain", "ngram", "jetspec-16"}
    mine = [p for p in results["points"] if p["server"] == "jetspec-16" and p["prompts"] == "all"]
    rates = sorted((p["x"], p["speed_up"]["p50_e2el_ms"]) for p in mine if p["x"] is not None)
    *drawn, gap, (_, at_once) = speed_up["jetspec-16"]
    # No line leads to all requests at once, which is not a rate.
    assert len(rates) >= 4 and drawn == rates and gap is None
    assert at_once == next(p for p in mine if p["level"] == "burst")["speed_up"]["p50_e2el_ms"]
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels[0] == "idle" and labels[-1] == "all\nat once"
    marks = [line.get_data() for line in figure.axes[0].lines if line.get_marker() == "D"]
    crossed = [found["rate"] for found in results["crossover"].values() if found["rate"]]
    assert crossed and [float(xs[0]) for xs, _ in marks] == crossed


def test_lines_join_only_measured_neighbours(results: dict[str, Any]) -> None:
    rates = [p for p in results["points"] if p["server"] == "ngram" and p["prompts"] == "all"
             and p["level"].startswith("rate=")]  # fmt: skip
    results["points"].remove(sorted(rates, key=lambda p: p["x"])[1])
    figure = draw(results)
    assert figure is not None
    found = lines(figure.axes[0])
    assert found["ngram"].index(None) == 2 and found["jetspec-16"].index(None) > 2


def test_a_system_has_one_color_in_all_panels(results: dict[str, Any]) -> None:
    for point in results["points"]:
        if point["server"] == "ngram":
            point["p50_tpot_ms"] = None
    figure = draw(results)
    assert figure is not None
    colors: dict[str, set[str]] = {}
    for axis in figure.axes:
        for name in lines(axis):
            (line,) = [line for line in axis.lines if line.get_label() == name]
            colors.setdefault(name, set()).add(str(line.get_color()))
    assert {len(own) for own in colors.values()} == {1} and len(set.union(*colors.values())) == 3


def test_loads_without_rates_are_drawn_by_requests_in_flight(
    results: dict[str, Any], tmp_path: Path
) -> None:
    results["points"] = [p for p in results["points"] if p["concurrency"] in (4, 8)]
    figure = draw(results)
    assert figure is not None
    assert [x for x, _ in lines(figure.axes[1])["plain"]] == [4, 8]
    assert [path.name for path in write_figure(results, tmp_path)] == ["results.svg"]
    results["points"] = [p for p in results["points"] if p["concurrency"] == 4]
    assert draw(results) is None and write_figure(results, tmp_path) == []
