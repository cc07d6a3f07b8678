# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import vllm_specplug.provenance as module
from vllm_specplug.provenance import UncommittedChanges, commit, provenance, require_committed


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, from which the package is said to run."""
    for name in ("code.py", "README.md", "bench/results/a.json", "docs/a.svg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one\n")
    for command in ("init -q", "add .", "commit -q -m one"):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command.split()], check=True)
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    return tmp_path


def test_changed_code_is_refused_and_marked_when_allowed(checkout: Path) -> None:
    clean = commit()
    assert clean is not None and len(clean) == 12
    require_committed(allow_changes=False)
    (checkout / "code.py").write_text("two\n")
    assert commit() == f"{clean}+changes"
    with pytest.raises(UncommittedChanges, match=rf"{clean}\+changes.*--allow-changes"):
        require_committed(allow_changes=False)
    require_committed(allow_changes=True)


def test_writing_results_and_prose_does_not_taint_the_next_result(checkout: Path) -> None:
    for name in ("README.md", "bench/results/a.json", "docs/a.svg"):
        (checkout / name).write_text("two\n")
    require_committed(allow_changes=False)


def test_a_command_reads_as_one_would_type_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(module.__file__).parents[1] / "bench" / "lookups.py"
    monkeypatch.setattr("sys.argv", [str(script), "--data", "my prompts"])
    assert provenance()["command"] == "python bench/lookups.py --data 'my prompts'"
    monkeypatch.setattr("sys.argv", ["/opt/bin/specplug", "evaluate", f"{Path.home()}/models/x"])
    assert provenance()["command"] == "specplug evaluate ~/models/x"
