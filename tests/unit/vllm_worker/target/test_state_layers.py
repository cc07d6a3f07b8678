# SPDX-License-Identifier: Apache-2.0
"""Layers with a recurrent state: which are served, and the rows that warm them up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplug.vllm_attention.state_rows import StateStep, warmup_step
from vllm_specplug.vllm_worker.target.state_layers import (
    StateLayers,
    check_state_blocks,
    prepare_state_layers,
)


def test_layers_are_served_by_their_class() -> None:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    assert prepare_state_layers({"attention": object()}, "ngram_tree") == StateLayers()
    layer = MambaMixer2.__new__(MambaMixer2)
    with pytest.raises(ValueError, match=r"'ngram_tree' .*'layers\.3'.*MambaMixer2.*Use a target"):
        prepare_state_layers({"layers.3": layer}, "ngram_tree")


def cache_groups(mode: str, size: int) -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(
        block_size=size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )
    group = SimpleNamespace(kv_cache_spec=spec)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=object()), group])


def test_no_path_may_fill_two_blocks() -> None:
    check_state_blocks(cache_groups("align", 17), 16, "ngram_tree")
    check_state_blocks(cache_groups("none", 16), 16, "ngram_tree")
    message = r"'ngram_tree': num_speculative_tokens=16 .* 16 tokens.*enable_prefix_caching=False"
    with pytest.raises(ValueError, match=message):
        check_state_blocks(cache_groups("align", 16), 16, "ngram_tree")


@pytest.mark.parametrize(
    ("rows", "requests", "sizes"), [(2, 8, [2]), (9, 8, [9]), (24, 8, [8, 8, 8]), (40, 2, [20, 20])]
)
def test_warmup_rows_are_trees(rows: int, requests: int, sizes: list[int]) -> None:
    step = warmup_step(rows, requests, 9, StateStep, torch.device("cpu"))
    assert step.starts.diff().tolist() == sizes and step.linear is None
    assert step.rows.tolist() == list(range(rows))
    for start, size in zip(step.starts.tolist(), sizes, strict=False):
        assert step.parents[start] == -1
        children = torch.bincount(step.parents[start + 1 : start + size] - start)
        assert children.max() <= 2 and children.sum() == size - 1
