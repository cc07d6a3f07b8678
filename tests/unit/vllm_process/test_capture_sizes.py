# SPDX-License-Identifier: Apache-2.0
"""Which rows CUDA graphs are captured for by default."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_specplug.vllm_process import engine_args
from vllm_specplug.vllm_process.engine_args import TREE_CAPTURE_SIZES, checked

SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def captured(
    monkeypatch: pytest.MonkeyPatch, method: str, device: str = "cuda", **chosen: Any
) -> Any:
    """The sizes that vLLM is given for a method, where the user chose some."""
    monkeypatch.setattr(engine_args, "current_device", lambda: device)
    monkeypatch.setattr(engine_args, "check_engine_config", lambda config: None)
    asked = SimpleNamespace(
        spec_method=method, speculative_config=None, spec_model=None, max_num_scheduled_tokens=1,
        compilation_config=SimpleNamespace(**{name: chosen.get(f"in_{name}") for name in SIZES}),
        **{name: chosen.get(name) for name in SIZES},
    )  # fmt: skip
    checked(lambda args: None)(asked)
    return asked.cudagraph_capture_sizes


def test_steps_of_up_to_1024_rows_with_trees_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert captured(monkeypatch, "ngram_tree") == list(TREE_CAPTURE_SIZES)
    # Trees that fill tiles, of batches that are powers of two, need no padding.
    for rows in (8, 16, 32, 64, 128):
        for requests in (1, 2, 4, 8, 16, 32):
            assert rows * requests > 1024 or rows * requests in TREE_CAPTURE_SIZES


def test_other_engines_and_choices_of_the_user_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert captured(monkeypatch, "ngram") is None
    assert captured(monkeypatch, "ngram_tree", device="cpu") is None
    assert captured(monkeypatch, "ngram_tree", cudagraph_capture_sizes=[1]) == [1]
    for name in (SIZES[1], *(f"in_{name}" for name in SIZES)):
        assert captured(monkeypatch, "ngram_tree", **{name: 8}) is None
