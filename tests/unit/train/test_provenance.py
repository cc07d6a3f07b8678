# SPDX-License-Identifier: Apache-2.0
"""Provenance names what made a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm_specplug.train.provenance import write_provenance


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
    assert record["hardware"]["logical_cpus"] >= 1
    assert "commit" in record
