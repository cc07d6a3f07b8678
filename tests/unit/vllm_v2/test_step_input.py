# SPDX-License-Identifier: Apache-2.0
"""What drafters are told of a step of the V2 runner."""

from __future__ import annotations

import numpy as np

from vllm_specplug.vllm_v2.step_input import HostRequest, next_tokens


def _request(tokens: np.ndarray, num_computed: int) -> HostRequest:
    return HostRequest("r", 0, tokens, 999, True, num_computed)


def test_the_token_after_each_committed_one() -> None:
    """A prompt's chunk ends before a prompt token, a decoding request before its anchor."""
    batch = [
        _request(np.arange(100, 130), 8),
        _request(np.arange(200, 224), 23),
        _request(np.arange(300, 309), 9),  # its last token has no follower
    ]
    positions = np.array([3, 4, 5, 6, 7, 20, 21, 22, 7, 8])
    following = next_tokens(positions, batch)
    assert following.tolist() == [104, 105, 106, 107, 108, 221, 222, 223, 308, 0]
    assert following.dtype == np.int64
