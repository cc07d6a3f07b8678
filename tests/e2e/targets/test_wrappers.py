# SPDX-License-Identifier: Apache-2.0
"""Multimodal wrappers with positions on one axis, served for text."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.families import around_windows
from tests.e2e.pair import Pair, pair
from tests.e2e.vision import have_torchvision
from tests.e2e.wrappers import mistral3_target

pytestmark = [pytest.mark.e2e, pytest.mark.own_process, pytest.mark.full]


def engines(**engine: Any) -> Pair:
    have_torchvision()
    return pair("oracle", model=mistral3_target(), limit_mm_per_prompt={"image": 0}, **engine)


def test_text_behind_a_wrapper() -> None:
    """Positions of nodes follow depth on the one axis; linear ones would show."""
    for ahead in (False, True):
        made = engines(tree={"async_scheduling": ahead})
        assert (around_windows(made).stale > 0) == ahead
        with (
            patch("vllm_specplug.vllm_v2.runner.set_positions", lambda trees, positions: None),
            pytest.raises(AssertionError, match="differs"),
        ):
            around_windows(made)
