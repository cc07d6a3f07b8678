# SPDX-License-Identifier: Apache-2.0
"""Latent attention of tree rows: each row as if its branch had been decoded alone, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.spoilt_rows import BAD_ROWS, TREES, check_rows
from vllm_specplug.kernels import (
    LatentSpan,
    isolate_nonfinite,
    latent_attn,
    latent_spans,
    move_latents,
)
from vllm_specplug.kernels.extension import ISA_VARIABLE
from vllm_specplug.kernels.masks import ancestor_words, words_to_bool

HEADS, LATENT, ROTARY, BLOCK = 3, 48, 16, 4
SIZE = LATENT + ROTARY
SCALE = 0.3


def mask_of(parents: list[int]) -> torch.Tensor:
    """Rows of a root and its nodes."""
    return words_to_bool(ancestor_words([np.array(parents, np.int32)]), len(parents) + 1)


def make_spans(shapes: list[tuple[int, list[int]]], first_row: int = 0) -> list[LatentSpan]:
    """Of (context, parents of the nodes), one behind the other; requests in reverse order."""
    spans = []
    for i, (context, parents) in enumerate(shapes):
        spans.append(LatentSpan(len(shapes) - 1 - i, first_row, context, mask_of(parents)))
        first_row += len(parents) + 1
    return spans


def make_step(spans: list[LatentSpan], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Query, cache and block table; the query has a row before the spans and one behind them."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(span.context + span.num_rows for span in spans)
    blocks = -(-longest // BLOCK)
    table = torch.randperm(blocks * len(spans) + 3, generator=generator)
    table = table[: blocks * len(spans)].view(len(spans), blocks).int()
    cache = torch.randn(blocks * len(spans) + 3, BLOCK, SIZE, generator=generator)
    rows = max(span.first_row + span.num_rows for span in spans) + 1
    return torch.randn(rows, HEADS, SIZE, generator=generator), cache, table


def decoded_alone(
    query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, spans: list[LatentSpan]
) -> torch.Tensor:
    """Row by row, head by head, over the context and the row's ancestors in their order."""
    query, cache = query.double(), cache.double()
    output = torch.full((*query.shape[:2], LATENT), 7.0, dtype=torch.float64)
    for span in spans:
        for i in range(span.num_rows):
            own = span.mask[i].nonzero()[:, 0].tolist()
            slots = [*range(span.context), *(span.context + j for j in own)]
            keys = torch.stack([cache[int(table[span.request, s // BLOCK]), s % BLOCK]
                                for s in slots])  # fmt: skip
            for head in range(HEADS):
                scores = keys @ query[span.first_row + i, head] * SCALE
                output[span.first_row + i, head] = scores.softmax(0) @ keys[:, :LATENT]
    return output


def attended(
    query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, spans: list[LatentSpan]
) -> torch.Tensor:
    output = torch.full((*query.shape[:2], LATENT), 7.0, dtype=query.dtype)
    latent_attn(query, cache, output, spans, table, SCALE)
    return output


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


RAGGED: list[tuple[int, list[int]]] = [
    (9, [-1, -1, 0, 0, 1, 3, 3]), (0, [-1, 0, -1]), (31, []), (4, [-1, 0, 1, 2, 3]),
    (70, [i // 2 - 1 for i in range(66)]),
]  # fmt: skip
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=["at once", "in pieces", "reference"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reference":
        monkeypatch.setenv(ISA_VARIABLE, "reference")
    if request.param == "in pieces":
        # A block at a time: pieces of the context, of both, of only the tree's own rows.
        monkeypatch.setattr(latent_spans, "_MOST_SCORES", 1)
        monkeypatch.setattr(latent_spans, "_FEWEST_TOKENS", 1)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_every_branch_is_decoded_as_alone(dtype: torch.dtype) -> None:
    spans = make_spans(RAGGED, first_row=1)
    query, cache, table = make_step(spans)
    query, cache = query.to(dtype), cache.to(dtype)
    expected = decoded_alone(query, cache, table, spans)
    # Rows of no span stay as they are, which is 7.
    assert error(attended(query, cache, table, spans), expected) < LIMITS[dtype]


def test_a_line_for_a_tree_is_seen() -> None:
    spans = make_spans(RAGGED[:1])
    step = make_step(spans)
    line = [LatentSpan(0, 0, 9, torch.ones(8, 8, dtype=torch.bool).tril())]
    assert error(attended(*step, line), decoded_alone(*step, spans)) > 1e-2


@st.composite
def shapes(draw: Any) -> list[tuple[int, list[int]]]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        nodes = draw(st.integers(0, 20))
        parents = [draw(st.integers(-1, i - 1)) for i in range(nodes)]
        found.append((draw(st.integers(0, 40)), parents))
    return found


@settings(max_examples=40, deadline=None)
@given(shapes(), st.integers(1, 400))
def test_any_trees_in_pieces_of_any_size(found: list[tuple[int, list[int]]], scores: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_spans, "_MOST_SCORES", scores)
        patch.setattr(latent_spans, "_FEWEST_TOKENS", 1)
        spans = make_spans(found)
        query, cache, table = make_step(spans)
        output = attended(query.double(), cache.double(), table, spans)
        expected = decoded_alone(query, cache, table, spans)
        assert error(output[:-1], expected[:-1]) < 1e-12


def test_what_cannot_be_seen_does_not_matter() -> None:
    """Rows that are no ancestors, and anything behind the tree."""
    spans = make_spans([(6, [-1, -1, 0])])
    query, cache, table = make_step(spans)
    before = attended(query, cache, table, spans)
    block = cache[int(table[0, 2])]
    block[1] = 1e4  # slot 9, the last node
    block[2:] = float("nan")
    assert torch.equal(attended(query, cache, table, spans)[:3], before[:3])


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
    assert error(output, expected) < 2e-6


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


@pytest.mark.usefixtures("_kind")
def test_what_is_not_finite_reaches_those_who_attend_it() -> None:
    spans = make_spans([(c, p.tolist()) for c, p in TREES])
    query, cache, table = make_step(spans)
    clean = attended(query, cache, table, spans)
    for contains in (True, False):
        spoilt = cache.clone()
        for span in spans:
            for row in BAD_ROWS:
                slot = span.context + row
                block = int(table[span.request, slot // BLOCK])
                latent, rotary = cache[block, slot % BLOCK].split([LATENT, cache.shape[2] - LATENT])
                latent = latent.clone()
                latent[[0, 7]] = float("nan")
                if contains:
                    rotary, latent = isolate_nonfinite(rotary[None, None], latent[None, None])
                spoilt[block, slot % BLOCK] = torch.cat([latent.flatten(), rotary.flatten()])
        answer = attended(query, spoilt, table, spans)
        for span in spans:
            rows = slice(span.first_row, span.first_row + span.num_rows)
            if contains:
                check_rows(clean[rows], answer[rows])
                continue
            with pytest.raises(AssertionError, match="sees a row of another branch"):
                check_rows(clean[rows], answer[rows])
