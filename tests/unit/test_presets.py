# SPDX-License-Identifier: Apache-2.0
"""Settings with shipped heads, ready for --speculative-config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vllm_specplug.targets as targets
from vllm_specplug.presets import default_head, speculative_config
from vllm_specplug.registry import get_method, method_names


def test_presets_can_be_held_by_json() -> None:
    shipped = [name for name in method_names() if get_method(name).presets]
    # The target ships no module, and this package no DFlash2 head.
    assert set(method_names()) - set(shipped) == {"assistant_tree", "dflash2_tree", "mtp_tree"}
    for name in shipped:
        config = speculative_config("smollm2", name, num_speculative_tokens=32)
        assert config["method"] == name and config["num_speculative_tokens"] == 32
        assert ("model" in config) == get_method(name).needs_head
        json.dumps(config)


def test_a_method_by_its_head_is_the_default_one() -> None:
    config = speculative_config("smollm2", "tree")
    assert config == {**speculative_config("smollm2", "jetspec"), "method": "tree"}


def test_a_method_that_fuses_a_local_head_names_it() -> None:
    config = speculative_config("smollm2", "dels")
    assert Path(config["local_head"], "config.json").is_file()
    assert "local_head" not in speculative_config("smollm2", "ddtree")


def test_a_missing_folder_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets, "__file__", str(tmp_path / "package" / "targets.py"))
    with pytest.raises(ValueError, match="is not in this installation"):
        default_head("smollm2")
