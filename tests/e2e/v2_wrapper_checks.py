# SPDX-License-Identifier: Apache-2.0
"""Multimodal wrappers with positions on one axis, on trees of the V2 runner; see test_vision.py."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.e2e.target_checks import around_windows
from tests.e2e.wrapper_checks import engines
from vllm_specplug.vllm_v2 import runner as runner_module
from vllm_specplug.vllm_v2.plain_engine import use_v2

use_v2()


def check_text_behind_a_wrapper_on_v2() -> None:
    """Positions of nodes follow depth on the one axis; linear ones would show."""
    for ahead in (False, True):
        made = engines(tree={"async_scheduling": ahead})
        assert (around_windows(made).stale > 0) == ahead
        with (
            patch.object(runner_module, "set_positions", lambda trees, positions: None),
            pytest.raises(AssertionError, match="differs"),
        ):
            around_windows(made)
