# SPDX-License-Identifier: Apache-2.0
"""The scripts of bench/: what they make of cells that were measured."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "bench" / "results"


@pytest.fixture(autouse=True)
def _scripts_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    for name in ("VLLM_CPU_KVCACHE_SPACE", "HF_HUB_OFFLINE", "VLLM_LOGGING_LEVEL",
                 "VLLM_ENABLE_V1_MULTIPROCESSING"):  # fmt: skip
        # The scripts set them for their own process.
        monkeypatch.setenv(name, "1")


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_the_readmes_page_is_what_the_script_makes_of_its_cells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = "lookups_cells.jsonl"
    (tmp_path / cells).write_text((RESULTS / cells).read_text())
    monkeypatch.setattr(sys, "argv", ["lookups.py", "--report-only", "--out", str(tmp_path)])
    script("lookups").main()
    assert (tmp_path / "lookups.md").read_text() == (RESULTS / "lookups.md").read_text()


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


def test_cells_are_kept_by_settings_and_key(tmp_path: Path) -> None:
    harness = script("harness")
    path, key = tmp_path / "cells.jsonl", ("plain", "1 at once", 0)
    harness.CellStore(path).add("abc", key, {"seconds": 3.0})
    path.write_text(path.read_text() + '\n{"digest": "cut off')
    harness.CellStore(path).add("def", key, {"seconds": 4.0})
    store = harness.CellStore(path)
    assert store.get("abc", key)["seconds"] == 3.0 and store.latest_digest == "def"
    assert [row["seconds"] for row in store.rows("def")] == [4.0]
    assert store.get("abc", ("plain", "1 at once", 1)) is None


def test_prompts_of_all_files_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, texts in {"a": ("t1 t2", "t3"), "b": ("t5",)}.items():
        rows = [f'{{"prompt": "{text}"}}\n' for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    tokenizer = Mock(apply_chat_template=lambda messages, **_: messages[0]["content"].split())
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda target: tokenizer)
    found = script("lookups").chat_token_ids("target", tmp_path, 5, 1)
    # The file that runs out begins again; a prompt of two tokens is too long.
    assert found == [["t5"], ["t3"], ["t5"]]


class _Engine:
    """Two requests at once; each step gives a token to each, and one that takes in a prompt takes
    ten times as long."""

    def __init__(self) -> None:
        self.now, self.running, self.new = 0.0, {}, []
        self.llm_engine = self

    def add_request(self, req_id: str, prompt: Any, params: Any) -> None:
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
