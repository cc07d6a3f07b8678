# SPDX-License-Identifier: Apache-2.0
"""Caches in which each token and head has a scale of its own, as on CUDA, against plain vLLM
over the same cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e.cuda.cuda_pairs import INTERPRETED, PROMPTS, compare_windows, engines, is_equal
from tests.e2e.number_formats import VOCAB, folder, head
from tests.e2e.pair import Pair
from tests.e2e.requests import greedy
from tests.e2e.tiny import make_target
from tests.kernels.device_trees import other_scales
from vllm_specplug.kernels.kv_compact_triton import LayerCaches
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows

pytestmark = [*INTERPRETED, pytest.mark.full]


def _scales_changed(which: str, change: Any) -> Any:
    """Tree rows that take a scale for another."""
    stock = DeviceTreeRows.attend

    def attend(self: Any, query: Any, cache: Any, output: Any, scale: float, features: Any,
               block_table: Any) -> None:  # fmt: skip
        assert features.kind.token_scales
        scales = getattr(features, which)
        features = replace(features, **{which: other_scales(scales, change(scales))})
        stock(self, query, cache, output, scale, features, block_table)

    return patch.object(DeviceTreeRows, "attend", attend)


def _numbers_moved_alone(made: Pair) -> Any:
    """Accepted tokens leave their scales behind."""
    backend = made.runner.tree_backend
    caches = list(made.runner.state.target_caches().values())
    ((index, _),) = backend.groups
    return patch.object(
        backend, "groups", [(index, LayerCaches.of(list(map(backend.views, caches))))]
    )


def _before(scales: torch.Tensor) -> torch.Tensor:
    return scales.roll(1, 1)


def _check(made: Pair, stored: torch.dtype) -> None:
    caches = made.runner.state.target_caches().values()
    assert {cache.dtype for cache in caches} == {stored}
    assert compare_windows(made).skipping > 1


def _target(kind: str) -> dict[str, Any]:
    path = make_target(folder() / "plain", VOCAB)
    return {"model": str(path), "skip_tokenizer_init": True, "kv_cache_dtype": kind}


def test_draft_heads_beside_int8_caches() -> None:
    """A head's own keys and values keep the model's dtype, in pages of another size."""
    made = engines(
        "jetspec",
        ahead=True,
        target=_target("int8_per_token_head"),
        head={"model": str(head())},
    )
    backend = made.runner.tree_backend
    assert {sample.keys.dtype for sample in backend.samples} == {torch.int8}
    made.compare(PROMPTS, greedy(max_tokens=20, detokenize=False))


@pytest.mark.parametrize(
    ("kind", "stored"),
    [("int8_per_token_head", torch.int8), ("fp8_per_token_head", torch.uint8)],
)
def test_scales_of_each_token(kind: str, stored: torch.dtype) -> None:
    made = engines(ahead=True, target=_target(kind))
    _check(made, stored)
    controls = {
        **{
            f"{name} {change.__name__}": _scales_changed(name, change)
            for name in ("key_scales", "value_scales")
            for change in (torch.ones_like, _before)
        },
        "scales left behind": _numbers_moved_alone(made),
        "compaction": patch.object(made.runner.tree_backend, "compact", lambda *args: None),
    }
    assert not [name for name, control in controls.items() if is_equal(made, control)]
