# SPDX-License-Identifier: Apache-2.0
"""Local head checkpoints: ours, released pickles, and everything that must be refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.methods.dels.local_heads import TARGET, make, released
from vllm_specplug.methods.dels.checkpoint import (
    inspect_local_head,
    load_local_head,
    save_local_head,
)


@pytest.mark.parametrize("changes", [{"slot_size": 8}, {"kind": "gated"}, {"kind": "rnn"}])
def test_a_head_that_reads_the_blocks_states_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """It belongs to one block head, in whose checkpoint it is."""
    save_local_head(tmp_path, make("gru_factorized"), dtype=torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"{name} = {value!r}, legal: .* method dspark_tree"):
        load_local_head(tmp_path, TARGET)


@pytest.mark.parametrize(
    "name",
    ["gru_factorized", "gru_target_head", "gru_direct", "markov_direct", "markov_target_head"],
)
def test_released_pickles_are_read_in_place(tmp_path: Path, name: str) -> None:
    file = tmp_path / "local_head.pt"
    torch.save(released(name), file)
    expected = make(name)
    config = inspect_local_head(tmp_path, TARGET)
    assert config == expected.config
    loaded, _ = load_local_head(file, TARGET)
    for key, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


def test_a_file_beside_a_pickle_sets_the_fusion_weights(tmp_path: Path) -> None:
    file = tmp_path / "local_head.pt"
    torch.save(released("gru_factorized"), file)
    config = inspect_local_head(file, TARGET)
    assert [path.name for path in tmp_path.iterdir()] == ["local_head.pt"]
    file.with_suffix(".json").write_text(json.dumps({"alpha": 0.5, "beta": [0.1], "rank": 1}))
    assert inspect_local_head(file, TARGET) == replace(config, alpha=0.5, beta=[0.1])
    file.with_suffix(".json").write_text(json.dumps({"alpha": "much"}))
    with pytest.raises(ValueError, match="alpha"):
        inspect_local_head(file, TARGET)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file or folder"):
        inspect_local_head(tmp_path / "nothing", TARGET)
    with pytest.raises(ValueError, match="name the file to be used"):
        inspect_local_head(tmp_path, TARGET)
    save_local_head(tmp_path, make("markov"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "speed": 1}))
    with pytest.raises(ValueError, match=r"unknown keys \['speed'\]"):
        inspect_local_head(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="does not describe a local head"):
        inspect_local_head(tmp_path, TARGET)
    torch.save({"position_gates": torch.zeros(14, 2)}, tmp_path / "joint.pt")
    with pytest.raises(ValueError, match="joint checkpoint with position gates"):
        inspect_local_head(tmp_path / "joint.pt", TARGET)
