# SPDX-License-Identifier: Apache-2.0
"""The report page: its text, its charts, and whether it fits a real browser."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.fakes import RECORD, FakeMachine, make_sweep
from vllm_specplug.bench.figures import COLORS, system_colors
from vllm_specplug.bench.page import same_load, write_page
from vllm_specplug.bench.summary import summarize
from vllm_specplug.registry import method_names

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser to look at the page with: none of {', '.join(BROWSERS)}"
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    FakeMachine(monkeypatch)
    sweep = make_sweep(
        tmp_path, servers="plain,ngram,suffix,jetspec-16,jetspec-auto", dataset_requests=4,
        goodput=["tpot:50"], concurrency=[4, 8],
    )  # fmt: skip
    sweep.run()
    return summarize(sweep, RECORD)


def later(results: dict[str, Any], factor: float) -> dict[str, Any]:
    """Results of another commit, `factor` times as fast."""
    other = copy.deepcopy(results)
    other["provenance"]["commit"] = "fedcba987654"
    for entry in other["points"]:
        entry["output_throughput"] *= factor
        for name in ("p50_e2el_ms", "p50_tpot_ms"):
            entry[name] /= factor
    return other


def test_page_is_self_contained(results: dict[str, Any], tmp_path: Path) -> None:
    text = write_page([results], tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert not re.search(r"@import|url\((?!#)", text)
    found = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert found <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert len(text) < 800_000


def drawn(text: str) -> dict[str, list[tuple[str, str]]]:
    """What each panel draws: (name of the chart, run/server) by its heading."""
    sections = re.findall(r'<section data-panel="([^"]+)">(.*?)</section>', text, re.S)
    return {
        title: re.findall(r'<g id="([^":]+?):? (\d/[\w-]+)">', body) for title, body in sections
    }


def test_charts_draw_every_measured_server(results: dict[str, Any], tmp_path: Path) -> None:
    text = write_page([results], tmp_path / "page.html").read_text()
    charts = drawn(text)
    by_load = ["Speed-up", "Latency", "Throughput", "Draft size"]
    assert list(charts) == [
        *(f"{name} by requests per second" for name in by_load),
        *(f"{name} by requests in flight" for name in by_load),
        "Where time goes", "Acceptance by depth", "Acceptance by data set",
    ]  # fmt: skip
    speculating = ["0/ngram", "0/jetspec-16", "0/jetspec-auto"]
    speed_up = charts["Speed-up by requests per second"]
    assert [name for chart, name in speed_up if "crossover" not in chart] == 3 * speculating
    crossed = sum(found["rate"] is not None for found in results["crossover"].values())
    assert sum("crossover" in chart for chart, _ in speed_up) == crossed > 0
    latency = [name for _, name in charts["Latency by requests in flight"]]
    assert latency == 6 * ["0/plain", *speculating]
    throughput = {chart for chart, _ in charts["Throughput by requests per second"]}
    assert any("good requests/s" in chart for chart in throughput)
    assert len(charts["Acceptance by data set"]) == 2 * 3
    # Every mixed load of the plugin's servers, in four parts.
    assert len(charts["Where time goes"]) == 2 * 9 * 4
    assert text.count("all at once") > 5 and ">idle<" in text


def strokes(text: str, title: str, chart: str, server: str) -> list[int]:
    """Points of each unbroken line of a server in a chart."""
    section = text[text.index(f'<section data-panel="{title}">') :]
    group = re.search(rf'<g id="[^"]*, {chart}: 0/{server}">\s*<path d="([^"]*)"', section)
    assert group is not None
    return [1 + part.count("L") for part in group[1].split("M")[1:]]


def test_lines_join_measured_neighbours_alone(results: dict[str, Any], tmp_path: Path) -> None:
    mine = [p for p in results["points"] if p["server"] == "jetspec-16" and p["prompts"] == "all"]
    rates = sorted((p for p in mine if p["level"].startswith("rate=")), key=lambda p: p["x"])
    assert len(rates) >= 4
    panel, chart = "Speed-up by requests per second", "speed-up end to end"
    text = write_page([results], tmp_path / "page.html").read_text()
    # Idle and all rates; "all at once" is no rate, and no line leads to it.
    assert strokes(text, panel, chart, "jetspec-16")[0] == len(rates) + 1
    results["points"].remove(rates[1])
    text = write_page([results], tmp_path / "page.html").read_text()
    assert strokes(text, panel, chart, "jetspec-16")[:2] == [2, len(rates) - 2]
    assert strokes(text, panel, chart, "ngram")[0] == len(rates) + 1


def test_a_card_does_not_contradict_itself(results: dict[str, Any], tmp_path: Path) -> None:
    for entry in results["points"]:
        if entry["server"] == "jetspec-16" and entry["prompts"] == "all":
            entry["speed_up"]["p50_e2el_ms"] = 1.2
            entry["speed_up"]["output_throughput"] = 0.96 if entry["level"] == "burst" else 1.0
    text = write_page([results], tmp_path / "page.html").read_text()
    card = next(c for c in text.split('class="card"') if '"name">jetspec-16<' in c)
    assert "<dt>saturated</dt><dd>0.96× tokens/s</dd>" in card
    assert re.search(r"<dt>slower from</dt><dd>past [\d.]+/s</dd>", card)


def test_a_system_has_one_color_in_all_charts(results: dict[str, Any], tmp_path: Path) -> None:
    for server in results["servers"]:
        if server["name"] == "jetspec-16":
            server["name"] = "mine"
    for point in results["points"]:
        point["server"] = point["server"].replace("jetspec-16", "mine")
    results["crossover"]["mine"] = results["crossover"].pop("jetspec-16")
    text = write_page([results, later(results, 1.1)], tmp_path / "page.html").read_text()
    lines = re.findall(r'<g id="[^"]+: \d/([\w-]+)">\s*<path [^>]*stroke: (#\w{6})', text)
    bars = re.findall(r'<g id="data set: \d/([\w-]+)">\s*<path [^>]*fill: (#\w{6})', text)
    chips = re.findall(r'--c: (#\w{6})"></i>([\w-]+) · ', text)
    found: dict[str, set[str]] = {}
    for name, color in [*lines, *bars, *((name, color) for color, name in chips)]:
        found.setdefault(name, set()).add(color)
    assert set(found) == {"plain", "ngram", "mine", "jetspec-auto"}
    assert all(len(colors) == 1 for colors in found.values()), found
    assert len(set.union(*found.values())) == 4
    assert found["plain"] == {COLORS["plain"]} and found["ngram"] == {COLORS["ngram"]}


def test_known_systems_that_meet_in_a_plot_differ() -> None:
    together = [
        ("plain", "ngram", "suffix", "ngram_tree", "jetspec", "jetspec-16", "jetspec-auto"),
        ("plain", "ngram", "longspec", "longspec + n-grams", "longspec as shipped", "jetspec",
         "jetspec + n-grams", "jetspec as shipped"),
        ("plain", "ngram", "suffix", "ngram_tree", "tokenswift", "tokenswift-self",
         "tokenswift-heads"),
        ("plain", "one", "two", "three", "jetspec"),
    ]  # fmt: skip
    for names in together:
        colors = system_colors(names)
        assert len(set(colors.values())) == len(names), names
        for name in ("plain", "ngram", *method_names()):
            assert colors.get(name) in (None, system_colors([name])[name]), "other pages differ"


def test_page_says_what_was_measured_and_by_what(results: dict[str, Any], tmp_path: Path) -> None:
    text = write_page([results], tmp_path / "page.html").read_text()
    for part in ("0123456789ab", "vllm 0.32.0", "a CPU, 2 logical CPUs", "a GPU", "vllm serve m",
                 "left out: needs arctic-inference", "specplug bench --data data", "all at once",
                 "good req/s"):  # fmt: skip
        assert part in text, part
    crossover = results["crossover"]["jetspec-16"]["text"]
    assert f"<dt>slower from</dt><dd>{crossover}</dd>" in text


def test_names_cannot_break_out_of_the_page(results: dict[str, Any], tmp_path: Path) -> None:
    evil = '</script><script>alert("x")</script>'
    results["plan"]["model"] = results["servers"][1]["command"] = evil
    results["points"][1]["label"] = evil
    text = write_page([results], tmp_path / "page.html").read_text()
    assert evil not in text and "<script" not in text


def test_two_runs_are_compared_load_by_load(results: dict[str, Any], tmp_path: Path) -> None:
    other = later(results, 1.25)
    text = write_page([results, other], tmp_path / "page.html").read_text()
    section = text[text.index("<h2>0123456 against fedcba9</h2>") :]
    table = section[: section.index("</table>")]
    assert table.count("<tr") == 1 + len(results["points"])
    assert set(re.findall(r"([\d.]+)×</span>", table)) == {"1.25"}


def test_loads_match_when_rates_are_near() -> None:
    def entry(rate: float) -> dict[str, Any]:
        return {"server": "s", "prompts": "all", "level": f"rate={rate:g}", "x": rate}

    found = same_load(entry(1.0), [entry(0.8), entry(1.09), entry(0.95)])
    assert found is not None and found["x"] == 0.95
    assert same_load(entry(1.0), [entry(1.2), {**entry(1.0), "server": "t"}]) is None


def browse(page: Path, *options: str) -> str:
    """Opens a page and returns what the browser made of it; console messages fail the test."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage", f"--user-data-dir={page.parent / 'profile'}",
        "--enable-logging=stderr", "--virtual-time-budget=3000", *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return done.stdout


PHONE = """<body><iframe id=phone style="width:390px;height:800px"></iframe><script>
const frame = document.getElementById("phone");
frame.srcdoc = PAGE;
frame.onload = () => {
  const inner = frame.contentDocument, root = inner.documentElement;
  const right = [...inner.querySelectorAll("figure svg")].map(
    svg => svg.getBoundingClientRect().right);
  document.title = [root.scrollWidth, root.clientWidth, right.length, Math.max(...right)].join(" ");
};
</script></body>"""


@needs_browser
@pytest.mark.slow
def test_page_fits_a_phone_and_two_runs(results: dict[str, Any], tmp_path: Path) -> None:
    page = write_page([results, later(results, 1.1)], tmp_path / "page.html")
    wrapper = tmp_path / "phone.html"
    # A window cannot be as narrow as a phone, a frame can.
    inner = json.dumps(page.read_text()).replace("</script>", "<\\/script>")
    wrapper.write_text(PHONE.replace("PAGE", inner))
    dom = browse(wrapper, "--window-size=500,900", "--dump-dom")
    match = re.search(r"<title>([^<]+)</title>", dom)
    assert match is not None, dom[:500]
    scroll, width, charts, right = (float(number) for number in match[1].split())
    assert scroll <= width <= 390 and right <= width
    assert charts == page.read_text().count("<figure>") > 20
