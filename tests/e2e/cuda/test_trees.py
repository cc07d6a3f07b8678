# SPDX-License-Identifier: Apache-2.0
"""Trees as on CUDA against plain vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e import number_formats
from tests.e2e.cuda import cuda_device
from tests.e2e.cuda.cuda_pairs import (
    INTERPRETED,
    compare,
    compare_windows,
    engines,
    is_equal,
)
from tests.e2e.families import engine_of
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows

pytestmark = [*INTERPRETED, pytest.mark.full]


def _changing(**changes: Any) -> Any:
    """Tree rows whose layers have other features than they have."""
    original = DeviceTreeRows.attend

    def attend(self: Any, query: Any, cache: Any, output: Any, scale: float, features: Any,
               block_table: Any) -> None:  # fmt: skip
        if "block_table" in changes:
            block_table = self.metadata.block_table
        given = {name: value for name, value in changes.items() if name != "block_table"}
        original(self, query, cache, output, scale, replace(features, **given), block_table)

    return patch.object(DeviceTreeRows, "attend", attend)


def test_windows_and_sinks_in_groups() -> None:
    """gpt-oss: windows of 16 and full attention in KV cache groups of their own, and sinks."""
    cuda_device.need_experts()
    made = engines(ahead=True, target=engine_of("GptOss"))
    assert len(made.runner.kv_cache_config.kv_cache_groups) == 2
    backend = made.runner.tree_backend
    assert [index for index, _ in backend.groups] == [0, 1]
    counts = compare_windows(made)
    assert counts.skipping > 1 and counts.stale > 0, counts
    stock = backend.compact

    def by_the_first_table(*args: Any) -> None:
        tables = backend.block_tables
        backend.block_tables = [tables[0], tables[0]]
        stock(*args)
        backend.block_tables = tables

    controls = {
        "windows": _changing(window=0),
        "sinks": _changing(sinks=None),
        "block tables": _changing(block_table=None),
        "compaction": patch.object(backend, "compact", by_the_first_table),
    }
    assert not [name for name, control in controls.items() if is_equal(made, control)]


@pytest.mark.parametrize("ahead", [False, True])
def test_branching_trees(ahead: bool) -> None:
    assert compare(engines(ahead=ahead), ahead).skipping > 1


def test_fp8_caches_with_scales() -> None:
    """A checkpoint that asks for such a cache, with scales far from 1; queries are quantised
    where vLLM quantises them. See tests/kernels/test_cuda_fp8_cache.py for the controls."""
    target = {"model": str(number_formats.scaled_target()), "skip_tokenizer_init": True}
    made = engines(ahead=True, target=target)
    assert {c.dtype for c in made.runner.state.target_caches().values()} == {torch.uint8}
    assert compare_windows(made).skipping > 1
