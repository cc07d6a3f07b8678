# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tests.unit.bench.fakes as fakes
import vllm_specplug.bench.tune as tune_module
from tests.unit.bench.fakes import FakeMachine
from vllm_specplug.bench.plan import make_plan
from vllm_specplug.bench.tune import MAX_CANDIDATES, Tuner, candidates, tuning_table

FAST = "jetspec-8-w3"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.setattr(
        tune_module, "tree_option_names", lambda: ("tree_width", "tree_depth", "ngram_topk")
    )
    return FakeMachine(monkeypatch)


def make_tuner(folder: Path, head: str | None = "h", method: str = "jetspec") -> Tuner:
    (folder / "a.jsonl").write_text("".join(f'{{"prompt": "a{i}"}}\n' for i in range(60)))
    plan = make_plan({"model": "m", "head": head, "servers": "plain", "data": folder / "a.jsonl",
                      "rates": [], "concurrency": [1, 4]})  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    return Tuner(plan, method, folder / "out", folder, console)


def speeds(monkeypatch: pytest.MonkeyPatch, fast: float, others: float) -> None:
    monkeypatch.setattr(
        fakes, "tokens_per_step",
        lambda name: {"plain": 1.0, FAST: fast}.get(name, others),
    )  # fmt: skip
    monkeypatch.setattr(fakes, "step_ms", lambda name, batch: 40.0)


def test_candidates_are_distinct_settings_from_near_to_far() -> None:
    found = candidates("jetspec", "h")
    assert len(found) == MAX_CANDIDATES == len({entry.name for entry in found})
    configs = [entry.speculative_config for entry in found]
    assert configs[0] == {"method": "jetspec", "num_speculative_tokens": 16, "model": "h"}
    assert len({json.dumps(config, sort_keys=True) for config in configs}) == MAX_CANDIDATES
    for config in configs:
        assert config is not None and config["num_speculative_tokens"] > config.get("tree_depth", 0)


def test_candidates_without_a_head() -> None:
    for entry in candidates("ngram_tree", "h"):
        assert entry.speculative_config is not None and "model" not in entry.speculative_config
    with pytest.raises(ValueError, match="needs a draft head: add --head"):
        candidates("jetspec", None)
    with pytest.raises(ValueError, match="not one of this plugin's methods"):
        candidates("eagle", None)


def test_the_fastest_setting_survives_every_round(
    tmp_path: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch, fast=2.5, others=1.5)
    outcome = make_tuner(tmp_path).run(600.0)
    assert outcome.best is not None and outcome.best.name == FAST
    assert outcome.best.speed_up == pytest.approx(2.5, rel=0.05)
    assert json.loads(outcome.best_json()) == {
        "method": "jetspec", "model": "h", "num_speculative_tokens": 8, "tree_width": 3,
    }  # fmt: skip
    assert f"fastest with 1 at a time and 4 at a time: {FAST}, 2." in outcome.advice()
    counts: dict[int, set[str]] = {}
    for name, _, prompts in machine.runs:
        counts.setdefault(len(prompts), set()).add(name)
    assert [len(counts[n]) - 1 for n in sorted(counts)] == [MAX_CANDIDATES, 9, 3]
    assert all("plain" in names for names in counts.values()), "each round has its own baseline"
    assert outcome.num_untried == 0
    rows = tuning_table(outcome).columns[0]._cells
    assert rows[0] == FAST and len(rows) == MAX_CANDIDATES


def test_what_was_slower_than_plain_is_not_recommended(
    tmp_path: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch, fast=0.99, others=0.7)
    outcome = make_tuner(tmp_path).run(600.0)
    assert outcome.best is None
    assert "no setting was faster than plain vLLM" in outcome.advice()
    assert f"(the best was {FAST}, 0." in outcome.advice()


def test_luck_in_a_short_round_does_not_win(
    tmp_path: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that shone once and was not measured again cannot be the best."""
    speeds(monkeypatch, fast=1.2, others=1.1)
    slow_later = {"requests": 0}

    def tokens(name: str) -> float:
        if name == "jetspec-32":
            # The first round has two loads; later ones show the truth.
            slow_later["requests"] += 1
            return 3.0 if slow_later["requests"] <= 8 else 0.8
        return {"plain": 1.0, FAST: 1.2}.get(name, 1.1)

    monkeypatch.setattr(fakes, "tokens_per_step", tokens)
    outcome = make_tuner(tmp_path).run(600.0)
    assert outcome.best is not None and outcome.best.name == FAST
    assert outcome.trials[0].round == 2


def test_settings_that_fail_and_time_that_runs_out_are_told(
    tmp_path: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch, fast=2.0, others=1.5)
    machine.broken = {"jetspec-16"}
    outcome = make_tuner(tmp_path).run(600.0)
    assert "jetspec-16 failed: vllm serve (jetspec-16) exited" in outcome.advice()
    assert outcome.best is not None
    (tmp_path / "other").mkdir()
    nothing = make_tuner(tmp_path / "other").run(0.0)
    assert nothing.best is None and "nothing was measured" in nothing.advice()


def test_an_interrupted_tuning_continues_with_a_baseline_of_its_own(
    tmp_path: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch, fast=2.0, others=1.5)
    machine.interrupt_after = 30
    with pytest.raises(KeyboardInterrupt):
        make_tuner(tmp_path).run(600.0)
    machine.interrupt_after, earlier = None, len(machine.runs)
    # Meanwhile the machine has become three times as slow.
    monkeypatch.setattr(fakes, "step_ms", lambda name, batch: 120.0)
    outcome = make_tuner(tmp_path).run(600.0)
    keys = [(name, level, len(prompts)) for name, level, prompts in machine.runs]
    again = {key for key in keys if keys.count(key) > 1}
    assert {name for name, _, _ in again} == {"plain"}, "settings are measured once, plain again"
    assert [name for name, _, _ in machine.runs[earlier:]][:2] == ["plain", "plain"]
    assert all(1.0 < trial.speed_up < 2.1 for trial in outcome.trials), outcome.trials


def test_unknown_options_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "tree_option_names", lambda: ("tree_budget",))
    configs: list[Any] = [entry.speculative_config for entry in candidates("jetspec", "h")]
    assert [config.get("tree_budget") for config in configs[:5]] == [None, 16, None, None, None]
    assert all("tree_width" not in config for config in configs)
