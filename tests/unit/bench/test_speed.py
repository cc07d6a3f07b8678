# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import vllm_specplug.bench.speed as speed_module
from vllm_specplug.bench.load import LoadRun
from vllm_specplug.bench.speed import CellStore, SpeedBench, SpeedPlan, method_config


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", None),
        ("jetspec-16", {"num_speculative_tokens": 16}),
        (
            "jetspec-8-entropy",
            {"num_speculative_tokens": 8, "tree_builder": "entropy", "ngram_topk": 0},
        ),
        ("jetspec-7-chain", {"num_speculative_tokens": 7, "tree_width": 1, "ngram_topk": 0}),
    ],
)
def test_method_names(name: str, expected: dict[str, Any] | None) -> None:
    if expected is not None:
        expected = {"method": "jetspec", "model": "the/head", **expected}
    assert method_config(name, "the/head") == expected


def test_a_method_without_head_is_given_none() -> None:
    expected = {"method": "ngram_tree", "num_speculative_tokens": 6}
    assert (
        method_config("ngram_tree-6", "the/head") == method_config("ngram_tree-6", None) == expected
    )


@pytest.mark.parametrize("name", ["eagle-4", "jetspec", "jetspec-x", "jetspec-8-best", ""])
def test_unknown_method_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown\. Use plain, ngram, or METHOD-NODES"):
        method_config(name, "the/head")


def test_a_method_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a draft head: add --head"):
        method_config("jetspec-8", None)


def test_ratios_need_plain() -> None:
    with pytest.raises(ValueError, match="must contain 'plain'"):
        SpeedPlan("model", "head", methods=("ngram",))


class FakeMachine:
    """Stands in for servers and load; counts what is run and can break at the n-th run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[str, int, tuple[str, ...]]] = []
        self.started: list[tuple[str, dict[str, Any] | None]] = []
        self.break_at: int | None = None
        self.awake: set[str] = set()
        machine = self

        class Server:
            def __init__(self, spec: Any, log_path: Path) -> None:
                self.spec, self.log_path, self.base_url = spec, log_path, "http://none"

            def __enter__(self) -> Any:
                machine.started.append((self.spec.name, self.spec.speculative_config))
                machine.awake.add(self.spec.name)
                return self

            def __exit__(self, *exc: object) -> None:
                machine.awake.discard(self.spec.name)

            def wait_healthy(self) -> float:
                return 0.0

            def pause(self) -> None:
                machine.awake.discard(self.spec.name)

            def resume(self) -> None:
                machine.awake.add(self.spec.name)

        def load(server: Any, prompts: Any, *, concurrency: int, output_len: int) -> LoadRun:
            if machine.break_at == len(machine.runs):
                raise KeyboardInterrupt
            assert machine.awake == {server.spec.name}, "others must be paused"
            machine.runs.append((server.spec.name, concurrency, tuple(prompts)))
            return LoadRun(10.0, 1.0, output_len, 5.0, 6.0, 4, 32, 2)

        monkeypatch.setattr(speed_module, "VllmServer", Server)
        monkeypatch.setattr(speed_module, "run_load", load)
        monkeypatch.setattr(speed_module, "run_chats", lambda *args, **kwargs: None)
        monkeypatch.setattr(
            speed_module, "load_prompts", lambda data, name: [f"{name}{i}" for i in range(50)]
        )


def make_bench(out: Path, **options: Any) -> SpeedBench:
    plan = SpeedPlan(
        "model", "head", methods=("plain", "jetspec-8"), batches=(1, 4), rounds=2, **options
    )
    return SpeedBench(plan, out, out, out, Console(file=io.StringIO()))


def test_methods_take_turns_on_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(monkeypatch)
    make_bench(tmp_path).run_speed()
    assert [(name, batch) for name, batch, _ in machine.runs] == [
        ("plain", 1),
        ("jetspec-8", 1),
        ("plain", 4),
        ("jetspec-8", 4),
        ("jetspec-8", 1),
        ("plain", 1),
        ("jetspec-8", 4),
        ("plain", 4),
    ]
    prompts = [prompts for _, _, prompts in machine.runs]
    assert prompts[0] == prompts[1] and prompts[2] == prompts[3] and prompts[4] == prompts[5]
    assert set(prompts[0]).isdisjoint(prompts[4])


def test_an_interrupted_benchmark_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(monkeypatch)
    machine.break_at = 3
    with pytest.raises(KeyboardInterrupt):
        make_bench(tmp_path).run_speed()
    cells = tmp_path / "cells.jsonl"
    cells.write_text(cells.read_text() + '\n{"digest": "cut off')
    machine.break_at = None
    bench = make_bench(tmp_path)
    bench.run_speed()
    assert len(machine.runs) == 8
    assert len(bench.store.cells("speed")) == 8
    again = make_bench(tmp_path)
    again.run_speed()
    assert len(machine.runs) == 8


def test_results_of_other_settings_are_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(monkeypatch)
    make_bench(tmp_path).run_speed()
    other = make_bench(tmp_path, output_len=64)
    assert other.store.cells("speed") == []
    other.run_speed()
    assert len(machine.runs) == 16


def test_acceptance_lengths_use_the_full_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(monkeypatch)
    bench = make_bench(tmp_path, length_nodes=(8, 16), length_prompts=3)
    bench.run_lengths()
    assert len(bench.store.cells("length")) == 2 * 2 * 3
    configs = [config for _, config in machine.started]
    assert [c["num_speculative_tokens"] for c in configs if c] == [8, 8, 16, 16]
    assert all(c and c["max_step_rows"] == 65536 for c in configs)
    assert all(len(prompts) == 3 for _, _, prompts in machine.runs)


def test_store_keeps_cells_in_a_readable_file(tmp_path: Path) -> None:
    store = CellStore(tmp_path / "cells.jsonl", "abc")
    store.add(("speed", "0", "1", "plain"), {"tokens_per_s": 3.0})
    assert ("speed", "0", "1", "plain") in store
    row = json.loads((tmp_path / "cells.jsonl").read_text())
    assert row["key"] == ["speed", "0", "1", "plain"] and row["tokens_per_s"] == 3.0
    assert CellStore(tmp_path / "cells.jsonl", "other").cells("speed") == []
