# SPDX-License-Identifier: Apache-2.0
"""Provenance names what made a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from vllm_specplug.train.provenance import git_revision, write_provenance


def test_record_holds_command_commit_versions_hardware_and_facts(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys,
        "argv",
        ["/some/where/specplug", "train", "jetspec", "--target", f"{Path.home()}/models/x"],
    )
    path = write_provenance(tmp_path / "head", {"data": {"sequences": 5}})
    record = json.loads(path.read_text())
    assert record["command"] == "specplug train jetspec --target ~/models/x"
    assert record["data"] == {"sequences": 5}
    assert record["versions"]["python"]
    assert record["hardware"]["cores"] >= 1
    assert "git_revision" in record


def test_git_revision_tells_a_changed_checkout(tmp_path):
    assert git_revision(tmp_path) is None

    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments],
            check=True,
            capture_output=True,
        )

    git("init", "-q")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-q", "-m", "m")
    clean = git_revision(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "f").write_text("2")
    assert git_revision(tmp_path) == clean + "+changes"
