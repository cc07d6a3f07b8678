# SPDX-License-Identifier: Apache-2.0
"""Latent attention of tree rows: each row as if its branch had been decoded alone, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_suite import Specs, TreeSuite
from tests.kernels.device_trees import LatentTrees
from tests.kernels.spoilt_rows import TREES, as_it_is, check_spoilt
from vllm_specplug.kernels import (
    LatentSpan,
    isolate_nonfinite,
    latent_attn,
    latent_spans,
    move_latents,
)
from vllm_specplug.kernels.extension import ISA_VARIABLE
from vllm_specplug.kernels.masks import ancestor_mask


class SpanTrees(LatentTrees):
    """Trees that are answered by `latent_attn`, which has no parts and no trees of no rows."""

    limits = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

    def run(self, output: torch.Tensor, *, splits: int | None = None, skipped: int = 0) -> None:
        _, starts, rows, contexts, firsts = self.metadata().plan.tolist()
        parents = self.parent_rows()
        spans = [
            LatentSpan(r + 1, start, context, ancestor_mask(parents[first : first + n]))
            for r, (start, n, context, first) in enumerate(
                zip(starts, rows, contexts, firsts, strict=True)
            )
        ]
        cache = self.key_cache.squeeze(2).contiguous()
        latent_attn(self.query, cache, output, spans, self.block_table, self.scale)


@pytest.fixture(params=["at once", "in pieces", "reference"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reference":
        monkeypatch.setenv(ISA_VARIABLE, "reference")
    if request.param == "in pieces":
        # A block at a time: pieces of the context, of both, of only the tree's own rows.
        monkeypatch.setattr(latent_spans, "_MOST_SCORES", 1)
        monkeypatch.setattr(latent_spans, "_FEWEST_TOKENS", 1)


@pytest.mark.usefixtures("_kind")
class TestTrees(TreeSuite):
    narrow = {"heads": 1}

    def problem(self, specs: Specs, **options: Any) -> SpanTrees:
        return SpanTrees(specs, **options)

    @pytest.mark.parametrize("dtype", SpanTrees.limits, ids=str)
    def test_every_dtype(self, dtype: torch.dtype) -> None:
        specs = [(9, 7), (0, 3), (31, 0), (4, 5), (70, 66)]
        self.problem(specs, dtype=dtype, latent=48).check()

    def test_what_is_not_finite_reaches_those_who_attend_it(self) -> None:
        def isolated(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            size = value.shape[2]
            rotary, latent = isolate_nonfinite(key[..., size:], key[..., :size])
            return torch.cat([latent, rotary], dim=-1), latent

        made = SpanTrees(TREES)
        check_spoilt(made, isolated, made.answer)
        made = SpanTrees(TREES)
        with pytest.raises(AssertionError, match="sees a row of another branch"):
            check_spoilt(made, as_it_is, made.answer)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=3),
    st.integers(1, 400),
    st.integers(0, 99),
)
def test_any_trees_in_pieces_of_any_size(specs: Specs, scores: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_spans, "_MOST_SCORES", scores)
        patch.setattr(latent_spans, "_FEWEST_TOKENS", 1)
        SpanTrees(specs, dtype=torch.float64, page=4, seed=seed).check()


def test_as_vllm_decodes_single_rows() -> None:
    """The context part gives the values of plain decoding."""
    pytest.importorskip("vllm")
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    cache, query = torch.randn(8, 16, 576), torch.randn(3, 4, 576)
    table = torch.tensor([[4, 1, 6], [0, 2, 3], [5, 7, 4]], dtype=torch.int32)
    lengths = torch.tensor([33, 16, 48], dtype=torch.int32)
    expected, output = torch.zeros(3, 4, 512), torch.zeros(3, 4, 512)
    ops.mla_decode_kvcache_cpu(expected, query, cache, 576**-0.5, table, lengths)
    one = torch.ones(1, 1, dtype=torch.bool)
    spans = [LatentSpan(i, i, int(n) - 1, one) for i, n in enumerate(lengths)]
    latent_attn(query, cache, output, spans, table, 576**-0.5)
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)


def test_moves_read_before_they_write() -> None:
    caches = [torch.arange(8 * 3.0).view(2, 4, 3) + 100 * i for i in range(2)]
    kept = [cache.clone().view(-1, 3) for cache in caches]
    # A path whose sources are later destinations, and entries past a path.
    sources, targets = torch.tensor([3, 5, 7, 1, 1]), torch.tensor([2, 3, 5, 1, 1])
    move_latents(caches, sources, targets)
    for cache, before in zip(caches, kept, strict=True):
        expected = before.clone()
        expected[[2, 3, 5]] = before[[3, 5, 7]]
        assert torch.equal(cache.view(-1, 3), expected)
