# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens: those of the noise computed for every token, whatever lies in the rows."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specplug.kernels import gumbel_argmax
from vllm_specplug.kernels.extension import has_cpu_extension
from vllm_specplug.kernels.gumbel_argmax import UNDECIDED
from vllm_specplug.vllm_v2.cpu_kernels.sampling import _noise32 as noise_of


def draw(logits: torch.Tensor, divisors: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    winners = torch.full((len(logits),), 77)
    gumbel_argmax(logits, divisors, seeds, seeds // 3, winners)
    return winners


def reference(logits: torch.Tensor, divisors: torch.Tensor, seeds: torch.Tensor) -> list[int]:
    tokens = np.arange(logits.shape[1], dtype=np.uint32)
    rows = zip(logits.numpy(), divisors.numpy(), seeds.tolist(), strict=True)
    return [
        77 if d == 0 else int((row / d + noise_of(seed, seed // 3, tokens)).argmax())
        for row, d, seed in rows
    ]


@pytest.mark.skipif(not has_cpu_extension(), reason="the kernels are not compiled")
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 2, 15, 16, 17, 300, 5000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0, 200.0]),
    masked=st.sampled_from([0.0, 0.5, 0.999, 1.0]),
)
def test_equals_the_largest_of_all(seed: int, size: int, spread: float, masked: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, spread, (12, size))).float()
    logits[torch.from_numpy(rng.random((12, size)) < masked)] = -math.inf
    divisors = torch.from_numpy(rng.choice(np.array([0, 0.3, 1, 2.7], np.float32), 12))
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63, 12))
    winners = draw(logits, divisors, seeds)
    decided = winners != UNDECIDED
    expected = torch.tensor(reference(logits, divisors, seeds))
    assert torch.equal(winners[decided], expected[decided])
    assert decided.float().mean() > 0.8


@pytest.mark.skipif(not has_cpu_extension(), reason="the kernels are not compiled")
def test_what_rounding_decides_is_left_to_the_caller() -> None:
    seeds = torch.tensor([5, 5, 5, 5])
    logits = torch.full((4, 900), -math.inf)
    noise = torch.from_numpy(noise_of(5, 1, np.arange(900, dtype=np.uint32)))
    # Both sums are equal, or as good as; then clearly not.
    logits[:, 20], logits[:, 30] = -noise[20], -noise[30]
    logits[1, 30] += 2e-5
    logits[2, 30] += 2e-3
    logits[3, 40] = math.nan
    assert draw(logits, torch.ones(4), seeds).tolist() == [UNDECIDED, UNDECIDED, 30, UNDECIDED]


@pytest.mark.skipif(not has_cpu_extension(), reason="the kernels are not compiled")
@pytest.mark.parametrize("size", [4000.0, -4000.0, 60000.0])
def test_rounding_decides_more_among_large_logits(size: float) -> None:
    """The sums of 4000 and noise are multiples of 2**-12 in float32."""
    noise = noise_of(5, 1, np.arange(40, dtype=np.uint32)).astype(np.float64)
    for first, second in ((3, 20), (20, 3), (4, 5), (20, 21)):
        for gap, is_decided in ((0.0, False), (4e-8, False), (3e-7, False), (1e-5, True)):
            row = np.full(40, -math.inf)
            row[first], row[second] = size, size + noise[first] - noise[second]
            logits = torch.from_numpy(row)[None].float()
            ulps = np.spacing(np.float32(abs(size)))
            logits[0, second] += gap * abs(size)
            sums = logits[0].double().numpy() + noise
            winner = draw(logits, torch.ones(1), torch.tensor([5])).item()
            if abs(sums[first] - sums[second]) <= ulps:
                assert winner == UNDECIDED, (first, second, gap)
            elif is_decided:
                assert winner == second


@pytest.mark.skipif(not has_cpu_extension(), reason="the kernels are not compiled")
def test_infinities_are_ordered() -> None:
    logits = torch.full((3, 40), -math.inf)
    logits[1, 33] = math.inf
    logits[2, [7, 30]] = math.inf
    assert draw(logits, torch.ones(3), torch.arange(3)).tolist() == [0, 33, 7]


def test_tokens_are_drawn_by_their_probabilities() -> None:
    """Of 4,000 positions; five standard deviations."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().repeat(4000, 1)
    seeds = torch.arange(4000) * 3
    winners = draw(logits, torch.ones(4000), seeds)
    expected = torch.tensor(reference(logits, torch.ones(4000), seeds))
    winners = torch.where(winners == UNDECIDED, expected, winners)
    share = torch.bincount(winners, minlength=4) / 4000
    error = (share - probabilities).abs() / (probabilities * (1 - probabilities) / 4000).sqrt()
    assert error.max() < 5


@pytest.mark.skipif(not has_cpu_extension(), reason="the kernels are not compiled")
def test_rows_of_a_padded_vocabulary_are_drawn_as_others() -> None:
    torch.manual_seed(0)
    logits, divisors = torch.randn(6, 64)[:, :40], torch.tensor([1.0, 0, 1, 1, 0, 1])
    winners = draw(logits, divisors, torch.arange(6))
    assert winners.tolist() == draw(logits.contiguous(), divisors, torch.arange(6)).tolist()
    assert UNDECIDED not in winners.tolist()


def test_without_compiled_kernels_rows_are_left_to_the_caller() -> None:
    with patch.dict(gumbel_argmax.__globals__, has_cpu_extension=lambda: False):
        winners = draw(torch.randn(6, 40), torch.tensor([1.0, 0, 1, 1, 0, 1]), torch.arange(6))
    assert winners.tolist() == [-1, 77, -1, -1, 77, -1]


@pytest.mark.skipif(not has_cpu_extension(), reason="the kernels are not compiled")
def test_the_operator_refuses_what_does_not_fit() -> None:
    call = torch.ops.specplug.gumbel_argmax.default
    logits, floats, ints = torch.randn(3, 8), torch.ones(3), torch.ones(3, dtype=torch.int64)
    call(logits, floats, ints, ints, ints.clone())
    for bad in (
        (logits.half(), floats, ints, ints, ints), (logits[:, ::2], floats, ints, ints, ints),
        (logits[0], floats, ints, ints, ints), (logits, ints, ints, ints, ints),
        (logits, floats, ints[:2], ints, ints), (logits, floats, ints, ints.int(), ints),
        (logits, floats, ints, ints, floats),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="gumbel_argmax"):
            call(*bad)
