# SPDX-License-Identifier: Apache-2.0
"""The report page: its text here, its charts in a real browser."""

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
from vllm_specplug.bench.page import same_load, write_page
from vllm_specplug.bench.summary import summarize

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
    without_data = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    assert not re.search(r"""(src|href)=["'](?!data:)""", without_data)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", without_data)
    found = set(re.findall(r"https?://[^\s\"'<)]+", without_data))
    assert found <= {"http://www.w3.org/2000/svg"}
    assert len(text) < 400_000


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
    assert evil not in text and text.count("</script>") == 2


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


# Runs in the page after its own script: uses it as a reader would and writes down what it sees.
PROBE = """
<script>
{
const seen = {};
const panel = name => document.querySelector(`[data-panel="${name}"]`);
const drawn = name => [...panel(name).querySelectorAll("path[data-series]")]
  .map(path => path.dataset.series);
const click = (root, label) => [...root.querySelectorAll("button")].find(
  b => b.textContent === label).click();
seen.panels = [...document.querySelectorAll("[data-panel]")].map(p => p.dataset.panel);
seen.speedUp = drawn("Speed-up against load");
seen.latency = drawn("Latency against load").length;
seen.reference = document.querySelectorAll("[data-reference='1']").length;
seen.crossovers = document.querySelectorAll(".crossover").length;
seen.shares = panel("Where time goes").querySelectorAll("rect").length;
seen.sets = panel("Acceptance by data set").querySelectorAll("rect").length;
click(document.getElementById("legend"), "ngram");
seen.hidden = drawn("Speed-up against load");
click(document.getElementById("legend"), "ngram");
const before = panel("Latency against load").querySelector("svg").outerHTML;
click(panel("Latency against load"), "p99");
seen.changed = panel("Latency against load").querySelector("svg").outerHTML !== before;
const chart = panel("Speed-up against load").querySelector("svg");
const box = chart.getBoundingClientRect();
const at = { clientX: box.left + 60, clientY: box.top + 50 };
chart.dispatchEvent(new PointerEvent("pointermove", at));
seen.tip = panel("Speed-up against load").querySelector(".tip").innerText;
click(document.getElementById("legend"), "by requests in flight");
const other = panel("Throughput against load").querySelector("svg");
seen.inFlight = other.innerHTML.includes("requests in flight");
seen.paper = getComputedStyle(document.body).backgroundColor;
document.getElementById("theme").click();
document.getElementById("theme").click();
seen.dark = getComputedStyle(document.body).backgroundColor;
seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.body.innerHTML = "";
const out = document.createElement("pre");
out.id = "seen"; out.textContent = JSON.stringify(seen);
document.body.append(out);
}
</script></body>"""


@needs_browser
@pytest.mark.slow
def test_charts_in_a_browser(results: dict[str, Any], tmp_path: Path) -> None:
    page = write_page([results], tmp_path / "page.html")
    page.write_text(page.read_text().replace("</body>", PROBE))
    dom = browse(page, "--window-size=1280,1000", "--dump-dom")
    match = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.S)
    assert match is not None, dom[:2000]
    seen = json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert seen["panels"] == [
        "Speed-up against load", "Latency against load", "Throughput against load",
        "Draft size against load", "Where time goes", "Acceptance by depth",
        "Acceptance by data set",
    ]  # fmt: skip
    assert seen["speedUp"] == ["0/ngram", "0/jetspec-16", "0/jetspec-auto"]
    assert seen["latency"] == 4 and seen["reference"] == 1
    assert seen["crossovers"] == sum(c["rate"] is not None for c in results["crossover"].values())
    assert seen["crossovers"] > 0
    assert seen["shares"] == 7 * 4 and seen["sets"] == 2 * 3
    assert seen["hidden"] == ["0/jetspec-16", "0/jetspec-auto"] and seen["changed"]
    assert "1 at a time" in seen["tip"] and "2.45×" in seen["tip"], seen["tip"]
    assert seen["inFlight"] and seen["overflow"] <= 0
    brightness = [sum(map(int, re.findall(r"\d+", seen[key])[:3])) for key in ("paper", "dark")]
    assert brightness[0] > 600 and brightness[1] < 120


PHONE = """<body><iframe id=phone style="width:390px;height:800px"></iframe><script>
const frame = document.getElementById("phone");
frame.srcdoc = PAGE;
frame.onload = () => {
  const inner = frame.contentDocument, root = inner.documentElement;
  const charts = [...inner.querySelectorAll(".chart svg")];
  document.title = [root.scrollWidth, root.clientWidth,
    inner.querySelectorAll("path[data-series]").length,
    Math.max(...charts.map(svg => svg.getBoundingClientRect().right))].join(" ");
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
    scroll, width, paths, right = (float(number) for number in match[1].split())
    assert scroll <= width <= 390 and right <= width
    # Speed-up (2 x 3), latency and throughput (2 x 4), drafts and depth (2 x 3).
    assert paths == 6 + 8 + 8 + 6 + 6
