# SPDX-License-Identifier: Apache-2.0
"""A run is resumed from its own state only; others are refused with what they lack."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.train.heads import Job
from vllm_specplug.train.saved import read_saved, write_saved

MakeJob = Callable[..., Job]
ANOTHER = ", or has it in another form; resume with the version that saved it"


@pytest.fixture(scope="module")
def saved() -> dict[str, Path]:
    """Folder of a run of one step, by kind of head."""
    return {}


@pytest.fixture
def resume(saved: dict[str, Path], make_job: MakeJob, tmp_path_factory) -> Callable[..., None]:
    """`resume(kind, edit)` resumes a run of one step whose folder `edit` has changed."""

    def run(kind: str, edit: Callable[[Path], None]) -> None:
        if kind not in saved:
            saved[kind] = tmp_path_factory.mktemp("saved") / "run"
            make_job(kind, total_steps=1).changed(out=saved[kind]).train()
        job = make_job(kind, total_steps=2)
        shutil.copytree(saved[kind], job.run.out)
        edit(job.run.out)
        job.changed(resume=True).train()

    return run


def changing(**parts: Any) -> Callable[[Path], None]:
    """An edit of the saved state; a value of None removes a part."""

    def edit(folder: Path) -> None:
        state = torch.load(folder / "state.pt", weights_only=True)
        state |= parts
        kept = {name: value for name, value in state.items() if value is not None}
        torch.save(kept, folder / "state.pt")

    return edit


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"ema": None}, "ema"),
        ({"fixed": None}, "fixed"),
        ({"step": "1"}, "step"),
        ({"order": {"epoch": 0, "size": 12}}, "order.cursor"),
        ({"recipes": []}, "recipes"),
        ({"head": {"fc.weight": 1.0}}, "head"),
        ({"optimizers": []}, r"optimizers \(zip.*\)"),
        ({"optimizers": [{"state": {}}] * 2}, r"optimizers \(.*param_groups.*\)"),
    ],
)
def test_a_part_that_is_missing_or_has_another_form_is_named(
    parts: dict[str, Any], named: str, resume: Callable[..., None]
) -> None:
    with pytest.raises(ValueError, match=f"state.pt lacks {named}{ANOTHER}"):
        resume("jetspec", changing(**parts))


@pytest.mark.parametrize("name", ["state.pt", "draft_ids.pt"])
@pytest.mark.parametrize("damage", ["cut", "empty", "text", "gone"])
def test_a_damaged_file_is_named(name: str, damage: str, resume: Callable[..., None]) -> None:
    def edit(folder: Path) -> None:
        path = folder / name
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(
                {"cut": content[: len(content) // 2], "empty": b"", "text": b"step 7"}[damage]
            )

    words = "does not exist; start without" if damage == "gone" else r"is damaged \(.*restore it"
    with pytest.raises(ValueError, match=f"{name} {words}"):
        resume("jetspec", edit)


def test_averages_of_other_tensors_are_refused(resume: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match=r"fc.weight = .*, but the checkpoint has None"):
        resume("jetspec", changing(ema={}))


@pytest.mark.parametrize(
    ("kind", "other", "words"),
    [
        # The same tensors, which mean something else.
        ("jetspec", "dflash", "causal = False, but the checkpoint has True"),
        ("eagle3", "jetspec", "head = 'BlockHead', but the checkpoint has 'Eagle3Head'"),
        ("gru", "markov", "kind = 'markov', but the checkpoint has 'gru'; resume with that one"),
        ("longspec", "tokenswift", "head = 'TokenSwiftHeads', but the checkpoint has"),
        ("dspark", "eagle3", "head = 'Eagle3Head', but the checkpoint has 'DSparkModel'"),
    ],
)
def test_the_state_of_another_method_is_refused(
    kind: str, other: str, words: str, make_job: MakeJob
) -> None:
    first = make_job(kind, total_steps=1)
    first.train()
    with pytest.raises(ValueError, match=words):
        make_job(other, total_steps=2).changed(resume=True).train()


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "run" / "state.pt"
    write_saved({"step": 1}, path)

    def full_disk(value: Any, path: Path) -> None:
        path.write_bytes(b"cut off")
        raise RuntimeError("unexpected pos 704 vs 598\nframes")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match=r"state.pt cannot be written \(unexpected pos 704 vs 598\)"):
        write_saved({"step": 2}, path)
    assert read_saved(path) == {"step": 1}
