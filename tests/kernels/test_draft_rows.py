# SPDX-License-Identifier: Apache-2.0
"""Draft layers whose norms, rotations and sums are joined to their products, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.draft_rows import HIDDEN, attend, config
from tests.kernels.paged import num_threads
from vllm_specplug.kernels import top_candidates
from vllm_specplug.kernels.draft_rows import can_join_rows
from vllm_specplug.kernels.packed_linear import has_packed_int8_products
from vllm_specplug.methods.block.fused_head import FusedBlockHead
from vllm_specplug.methods.block.fused_parts import plain_linear
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.vllm_worker.target.linear import int8_linear

POSITIONS = 64
needs_packed = pytest.mark.usefixtures("packed_int8")


@pytest.fixture
def packed_int8() -> None:
    if not has_packed_int8_products():
        pytest.skip("this CPU has no packed int8 products")


@torch.inference_mode()
def _fused(**changes: Any) -> FusedBlockHead:
    torch.manual_seed(0)
    head = BlockHead(config(**changes))
    for parameter in head.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return FusedBlockHead(head.bfloat16(), POSITIONS, int8_linear)


def _both(fused: FusedBlockHead, compute: Any) -> tuple[Any, Any]:
    """What is computed with everything joined, and composed of torch's operators."""
    assert fused.joins_rows
    joined = compute()
    fused.joins_rows = False
    composed = compute()
    fused.joins_rows = True
    return joined, composed


def _assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Rows closer than one changed last bit of their inputs leaves them, which int8 rows of three
    layers make 3 to 4 percent of."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    error = (found.float() - expected.float()).flatten(1).norm(dim=1)
    assert bool((error <= 0.045 * expected.float().flatten(1).norm(dim=1)).all()), error


@needs_packed
@pytest.mark.parametrize("rows", [1, 8, 15, 70])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"partial_rotary_factor": 0.5}])
@torch.inference_mode()
def test_layers_equal_the_composed_ones(rows: int, changes: dict[str, Any]) -> None:
    fused = _fused(**changes)
    x = torch.randn(rows, HIDDEN).bfloat16()
    positions = torch.arange(rows) % POSITIONS
    given = x.clone()
    joined, composed = _both(fused, lambda: fused(x, positions, attend))
    _assert_near(joined, composed)
    assert torch.equal(x, given)


@needs_packed
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@torch.inference_mode()
def test_context_equals_the_composed_one(rows: int) -> None:
    fused = _fused(attention_bias=True)
    aux, positions = torch.randn(rows, 96).bfloat16(), torch.arange(rows) + 7
    joined, composed = _both(fused, lambda: fused.context_heads(aux, positions))
    for found, expected in zip(joined, composed, strict=True):
        _assert_near(found.transpose(0, 1), expected.transpose(0, 1))
        assert found.shape == expected.shape == (3, rows, 2, 64)


@needs_packed
@torch.inference_mode()
def test_both_draft_the_same_tokens() -> None:
    fused, lm_head = _fused(), int8_linear(torch.randn(512, HIDDEN).bfloat16(), None)
    x, positions = torch.randn(240, HIDDEN).bfloat16(), torch.arange(240) % POSITIONS
    (ids, log_probs), (other_ids, other_log_probs) = _both(
        fused, lambda: top_candidates(lm_head(fused(x, positions, attend)), 4)
    )
    # Neighbours that tie within rounding may change places: a logit differs by up to about 1, on
    # some CPUs by more than on others.
    gaps = other_log_probs[:, :-1] - other_log_probs[:, 1:]
    for place in range(3):
        clear = (gaps[:, : place + 1] > 1.0).all(dim=1)
        assert int(clear.sum()) >= 10
        assert torch.equal(ids[clear, : place + 1], other_ids[clear, : place + 1])
    errors = (log_probs - other_log_probs).abs()
    assert errors.quantile(0.99) <= 1.0 and errors.mean() <= 0.25, errors


@needs_packed
@torch.inference_mode()
def test_a_row_is_the_same_in_any_company_and_on_any_threads() -> None:
    fused = _fused()
    x, aux = torch.randn(40, HIDDEN).bfloat16(), torch.randn(40, 96).bfloat16()
    positions = torch.arange(40)
    with num_threads(1):
        together, (keys, values) = fused(x, positions, attend), fused.context_heads(aux, positions)
        part = slice(5, 9)
        assert torch.equal(fused(x[part], positions[part], attend), together[part])
        some = fused.context_heads(aux[part], positions[part])
        assert torch.equal(some[0], keys[:, part]) and torch.equal(some[1], values[:, part])
    with num_threads(3):
        assert torch.equal(fused(x, positions, attend), together)
        again = fused.context_heads(aux, positions)
        assert torch.equal(again[0], keys) and torch.equal(again[1], values)


@needs_packed
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38])
@torch.inference_mode()
def test_what_is_no_number_stays_in_its_row(bad: float) -> None:
    fused, lm_head = _fused(), int8_linear(torch.randn(200, HIDDEN).bfloat16(), None)
    x, positions = torch.randn(8, HIDDEN).bfloat16(), torch.arange(8)
    clean = fused(x, positions, attend)
    x[3, 5] = bad
    spoilt = fused(x, positions, attend)
    others = [row for row in range(8) if row != 3]
    assert torch.equal(spoilt[others], clean[others])
    ids, log_probs = top_candidates(lm_head(spoilt), 4)
    assert int(ids.min()) >= 0 and int(ids.max()) < 200 and log_probs.shape == (8, 4)
    aux = torch.full((2, 96), bad).bfloat16()
    assert fused.context_heads(aux, positions[:2])[0].shape == (3, 2, 2, 64)


@needs_packed
@torch.inference_mode()
def test_what_does_not_fit_is_refused() -> None:
    fused = _fused()
    x = torch.randn(2, HIDDEN).bfloat16()
    for positions in (torch.tensor([0, POSITIONS]), torch.tensor([-1, 0])):
        with pytest.raises(RuntimeError, match="outside the table"):
            fused(x, positions, attend)
        with pytest.raises(RuntimeError, match="outside the table"):
            fused.context_heads(torch.randn(2, 96).bfloat16(), positions)
    with pytest.raises(RuntimeError, match="int64"):
        fused(x, torch.tensor([0, 1], dtype=torch.int32), attend)
    with pytest.raises(RuntimeError, match="bfloat16"):
        fused(x.float(), torch.arange(2), attend)
    with pytest.raises(RuntimeError, match="weight"):
        fused.context_heads(torch.randn(2, 60).bfloat16(), torch.arange(2))
    with pytest.raises(RuntimeError, match="contiguous"):
        fused(x, torch.arange(2), lambda *args: torch.empty(2, 6, 60).bfloat16().transpose(0, 1))


@torch.inference_mode()
def test_only_what_is_covered_is_joined() -> None:
    packed = [int8_linear(torch.randn(64, 64).bfloat16(), None)]
    assert can_join_rows(packed, 64, 64, torch.bfloat16) == has_packed_int8_products()
    assert not can_join_rows(packed, 64, 64, torch.float32)
    assert not can_join_rows(packed, 40, 32, torch.bfloat16)
    assert not can_join_rows(packed, 64, 48, torch.bfloat16)
    assert not can_join_rows(packed, 2048, 64, torch.bfloat16)
    plain = [*packed, plain_linear(torch.randn(64, 64).bfloat16(), None)]
    assert not can_join_rows(plain, 64, 64, torch.bfloat16)
