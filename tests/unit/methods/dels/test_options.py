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


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha = \[0.1, 0.2\], .* 4 depths .* 2..5; correct"):
        depth_weights("alpha", [0.1, 0.2], 5, first_depth=2)
