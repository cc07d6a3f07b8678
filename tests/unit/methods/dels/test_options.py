# SPDX-License-Identifier: Apache-2.0
"""Weights of the local head, one per depth."""

from __future__ import annotations

import pytest

from vllm_specplug.methods.dels.settings import depth_weights


@pytest.mark.parametrize(("first_depth", "leading"), [(1, ()), (2, (0.0,))])
def test_weights_of_depths(first_depth: int, leading: tuple[float, ...]) -> None:
    corrected = 5 - len(leading)
    assert depth_weights("alpha", 0.3, 5, first_depth=first_depth) == leading + (0.3,) * corrected
    listed = [0.1 * i for i in range(corrected)]
    assert depth_weights("beta", listed, 5, first_depth=first_depth) == (*leading, *listed)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.1, 0.2], r"alpha=\[0.1, 0.2\] .* 4 depths that are corrected, 2..5, not 2"),
        (-0.1, "alpha=-0.1 .* finite and at least 0"),
        (float("nan"), "alpha=nan .* finite"),
        ([0.1, 0.2, float("inf"), 0.1], "finite and at least 0"),
        ([0.1, 0.2, -1.0, 0.1], "finite and at least 0"),
    ],
)
def test_bad_weights_are_refused(value: float | list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        depth_weights("alpha", value, 5, first_depth=2)
