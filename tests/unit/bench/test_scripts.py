# SPDX-License-Identifier: Apache-2.0
"""The scripts of bench/: what they make of cells that were measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "bench" / "results"
WITHOUT_VLLM = (
    "acceptance", "block_trees", "budget_parts", "draft_sources", "equal_training",
    "longspec_heads", "packed_products",
)  # fmt: skip
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "bench").glob("*.py")
    if path.stem not in ("harness", "interleave", "prompt_resampling", "sides", "speeds")
)


@pytest.fixture(autouse=True)
def _scripts_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    for name in ("VLLM_CPU_KVCACHE_SPACE", "HF_HUB_OFFLINE", "VLLM_LOGGING_LEVEL",
                 "VLLM_ENABLE_V1_MULTIPROCESSING"):  # fmt: skip
        # The scripts set them for their own process.
        monkeypatch.setenv(name, "1")


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_describes_its_flags(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        script(name).main()
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "--out" in shown and "--allow-changes" in shown
    assert ("--eager" in shown) == (name not in WITHOUT_VLLM)


@pytest.mark.parametrize(("name", "page"), [("lookups", "lookups")])
def test_published_pages_are_what_the_script_makes_of_their_cells(
    name: str, page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = f"{page}_cells.jsonl"
    (tmp_path / cells).write_text((RESULTS / cells).read_text())
    command = [f"{name}.py", "--report-only", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    script(name).main()
    for ending in ("md", "json"):
        made = (tmp_path / f"{page}.{ending}").read_text()
        assert made == (RESULTS / f"{page}.{ending}").read_text(), ending


def test_measuring_needs_prompts_and_committed_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["lookups.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        script("lookups").main()
    assert "--data is missing" in capsys.readouterr().err
    harness = script("harness")

    def refuse(allow_changes: bool) -> None:
        assert not allow_changes
        raise harness.UncommittedChanges("commit first")

    monkeypatch.setattr(harness, "require_committed", refuse)
    monkeypatch.setattr(sys, "argv", ["lookups.py", "--data", "p", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        script("lookups").main()
    assert "commit first" in capsys.readouterr().err


def cell(system: str, number: int, made: int, seconds: float) -> dict[str, Any]:
    return {"system": system, "load": "1 at once", "round": number, "decode_tokens": made,
            "decode_seconds": seconds}  # fmt: skip


def test_ratios_pair_cells_of_one_round() -> None:
    harness = script("harness")
    cells = [cell("a", 1, 30, 1.0), cell("a", 0, 20, 1.0), cell("plain", 0, 10, 1.0)]
    found = harness.by_load(cells)["1 at once"]
    assert [c["round"] for c in found["a"]] == [0, 1]
    assert harness.ratios(found["a"], found["plain"], harness.decode_rate) == [2.0]


def test_model_runners_are_compared_with_v1() -> None:
    runners = script("model_runners")
    speeds = {"V1": 10.0, "V2": 12.0, "V2 ahead": 15.0}
    batches = [str(batch) for batch in runners.BATCHES]
    rounds = [
        {side: dict.fromkeys(batches, speed + more) for side, speed in speeds.items()}
        for more in (0.0, 2.0)
    ]
    page = runners.page(rounds, {})
    header, row = page.sections[0].header, page.sections[0].rows[0]
    assert header[-2:] == ("V2 over V1", "V2 ahead over V1")
    assert row[1] == "11.0 (10.0 to 12.0)"
    assert row[-2:] == ["1.18 x (1.17 to 1.20)", "1.46 x (1.42 to 1.50)"]


SIDE = """
import os, sys
sys.path.insert(0, sys.argv[-1])
from sides import answer
print("what an engine says")
answer(lambda batch: batch * float(os.environ["FACTOR"]) if batch < 9 else 1 / 0)
"""


def test_sides_answer_in_turns_and_one_that_ends_says_why(tmp_path: Path) -> None:
    sides = script("sides")
    (tmp_path / "side.py").write_text(SIDE)

    def start(side: str) -> Any:
        return sides.Side(str(tmp_path / "side.py"), [str(ROOT / "bench")], {"FACTOR": side})

    rounds = sides.in_turns(start, ["2", "3"], (1, 4), 2)
    assert rounds == 2 * [{"2": {"1": 2.0, "4": 8.0}, "3": {"1": 3.0, "4": 12.0}}]
    assert sides.table(rounds, ["2", "3"], (4,), 1) == [
        ["4", "8.0 (8.0 to 8.0)", "12.0 (12.0 to 12.0)", "1.50 x (1.50 to 1.50)"]
    ]
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        sides.in_turns(start, ["2"], (9,), 1)


def test_real_sizes_measure_what_is_missing_and_continue_each_round_to_the_whole_depth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = script("real_sizes")
    both = ["bf16, vLLM", "bf16, packed"]
    asked: list[Any] = []

    def in_turns(start: Any, sides: list[str], nodes: Any, rounds: int) -> list[Any]:
        name, layers = start.args[1:]
        asked.append((name, layers, sides, rounds))
        # Of a layer and of what is beside all layers; a row costs a tenth of it.
        layer = {"bf16, vLLM": 10.0, "bf16, packed": 8.0}
        return [
            {
                side: {
                    str(n): {"verify": (102 - number) * (layers * layer[side] + 5) * (1 + n / 10),
                             "draft": 7.0}
                    for n in nodes
                }
                for side in sides
            }
            for number in range(rounds)
        ]  # fmt: skip

    def run(rounds: int) -> list[Any]:
        asked.clear()
        command = ["real_sizes.py", "--allow-changes", "--out", str(tmp_path), f"--rounds={rounds}",
                   "--model", "qwen3-4b", "--side", *both]  # fmt: skip
        monkeypatch.setattr(sys, "argv", command)
        sizes.main()
        return list(asked)

    monkeypatch.setattr(sizes, "in_turns", in_turns)
    assert run(2) == [("qwen3-4b", 5, both, 2), ("qwen3-4b", 1, both, 2)]
    assert run(2) == []
    assert run(3) == [("qwen3-4b", 5, both, 1), ("qwen3-4b", 1, both, 1)]
    (found,) = json.loads((tmp_path / "real_sizes.json").read_text())["data"]
    for number, factor in (("0", 102), ("1", 101), ("2", 102), ("medians", 102)):
        by_nodes = found["ms"]["bf16, vLLM"][number]
        assert by_nodes["0"]["verify"] == pytest.approx(factor * 365)
        assert by_nodes["0"]["draft"] == 7.0
    packed = f"{293 / 365 * 1.8:.2f}"
    assert f"| {packed} ({packed} to {packed}) |" in (tmp_path / "real_sizes.md").read_text()


def test_heads_of_equal_training_have_equal_size(
    target_with_tokenizer: Path, feature_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    equal = script("equal_training")
    folders = (str(folder) for folder in (target_with_tokenizer, *feature_folders))
    setup = equal.Setup(*folders, 40, 9_800, tokens=140, tokens_per_step=70, eval_sequences=2)
    found = equal.train_all(setup, tmp_path, None)
    assert list(found) == ["jetspec", "dflash", "dels", "dspark", "eagle3"]
    assert {facts["progress"]["step"] for facts in found.values()} == {2}
    for kind, facts in found.items():
        # Widths are rounded down to 16 units of 3 x 32 numbers; norms come on top.
        excess = facts["parameters"] - 9_800
        assert -16 * 3 * 32 < excess < 6 * 32, (kind, facts["parameters"])
        shares = facts["heldout"]["rounds_reaching_depth"]["chain"]
        assert shares == sorted(shares, reverse=True)
    assert [row[0] for row in equal.page(found, {}).sections[0].rows] == list(found)


def test_pages_of_own_chains_are_named_by_the_method() -> None:
    chains = script("own_chains")
    more = {
        "tokens_per_s": 10.0, "decode_steps": 5, "accepted": 5, "drafts": 5, "same_as_plain": 1,
        "prompts": 1, "draft_ms": 1.5, "provenance": {},
    }  # fmt: skip
    cells = [cell(name, 0, 10, 1.0) | more for name in ("plain", "chain of 3", "tree of 16")]
    page = chains.page("own_eagle3_chains", chains.METHODS["eagle3"], cells)
    assert page.name == "own_eagle3_chains"
    assert [row[0] for row in page.sections[0].rows] == ["plain", "chain of 3", "tree of 16"]
    row = ["10.0", "1.00 x (1.00 to 1.00)", "-", "-", "2.00", "2.00", "1.5"]
    assert page.sections[0].rows[2][1:8] == row


def test_the_slowest_answers_are_compared_where_they_were_measured() -> None:
    harness = script("harness")
    names = ("tpot_ms", "tpot_p99_ms", "pace_ms", "pace_p99_ms")
    plain = [{"round": 0, **dict(zip(names, (30.0, 33.0, 24.0, 26.0), strict=True))}]
    trees = [{"round": 0, **dict(zip(names, (20.0, 44.0, 12.0, 20.0), strict=True))}]
    expected = {"tpot_gain": 1.5, "tpot_p99_gain": 0.75, "pace_gain": 2.0, "pace_p99_gain": 1.3}
    assert harness.latency_gains(trees, plain) == expected
    del trees[0]["tpot_p99_ms"]
    assert harness.latency_gains(trees, plain) == {**expected, "tpot_p99_gain": None}


class _Engine:
    """Two requests at once; each step gives a token to each, and one that takes in a prompt takes
    ten times as long."""

    def __init__(self) -> None:
        self.now, self.running, self.new = 0.0, {}, []
        self.llm_engine = self

    def add_request(self, req_id: str, prompt: Any, params: Any, lora_request: Any) -> None:
        self.running[req_id] = [params.max_tokens, []]
        self.new.append(req_id)

    def step(self) -> list[Any]:
        self.now += 0.1 if self.new else 0.01
        self.new.clear()
        outputs = []
        for req_id, (most, ids) in list(self.running.items()):
            ids.append(1)
            if len(ids) == most:
                del self.running[req_id]
            outputs.append(
                SimpleNamespace(
                    request_id=req_id, finished=len(ids) == most,
                    outputs=[SimpleNamespace(token_ids=list(ids))],
                )
            )  # fmt: skip
        return outputs


def test_pace_leaves_out_the_steps_that_take_in_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    interleave = script("interleave")
    llm = _Engine()
    monkeypatch.setattr("time.perf_counter", lambda: llm.now)
    monkeypatch.setattr(interleave, "CLOCK", Mock(return_value=0.0))
    counters = SimpleNamespace(totals=dict, draft_ms=[])
    monkeypatch.setattr(interleave.Serving, "_counters", counters)
    monkeypatch.setattr(interleave.Serving, "_latest", 1.0)
    params = SimpleNamespace(max_tokens=40)
    params.clone = lambda: SimpleNamespace(max_tokens=params.max_tokens)
    load = interleave.Load("2 at once", 0, [[1]] * 8, 2)
    llm.now = 1.0
    serving = interleave.serve_alone(interleave.Serving(llm, load, params, "x"))
    result = serving.result()
    assert result["pace_ms"] == pytest.approx(10.0) == result["pace_p99_ms"]
    assert result["tpot_ms"] > 12.0, "other requests' prompts are in it"


def test_local_heads_are_compared_with_the_block_head_alone() -> None:
    heads = script("fused_heads")
    more = {
        "tokens_per_s": 10.0, "decode_steps": 5, "accepted": 5, "drafts": 5, "same_as_plain": 1,
        "prompts": 1, "provenance": {},
    }  # fmt: skip
    drafting = {"GRU": 3.0, "Markov": 2.5}
    cells = [
        cell(name, 0, 10, 1.0) | more | {"draft_ms": drafting.get(name.split()[1], 2.0)}
        for name in ("plain base", *(s for s in heads.make_systems(16) if s != "plain"))
    ]
    cells[0] |= {"system": "plain", "draft_ms": None}
    (section,) = heads.page(cells, 16).sections
    assert (
        section.notes[0] == "The local head adds 50 % (GRU) and 25 % (Markov) to a chain's draft."
    )


def test_heads_that_were_trained_are_served(tmp_path: Path) -> None:
    for kind in ("jetspec", "dels", "dels-backbone"):
        (tmp_path / kind / "head").mkdir(parents=True)
    systems = script("equal_serving").make_systems(tmp_path, 8)
    assert list(systems) == ["plain", "jetspec", "dels"]
    assert systems["dels"]["model"] == str(tmp_path / "dels-backbone" / "head")
    assert systems["dels"]["local_head"] == str(tmp_path / "dels" / "head")


@pytest.mark.parametrize("began", [{"sha256": "abc"}, "target layers", None])
def test_trainings_are_told_apart_by_what_they_began_from(began: Any, tmp_path: Path) -> None:
    facts = {"shape": {}, "progress": {}, "data": {}, "init_from": began}
    (tmp_path / "provenance.json").write_text(json.dumps(facts))
    found = script("block_trees").training(tmp_path)["the head they began from"]
    assert found == ("abc" if isinstance(began, dict) else began)
