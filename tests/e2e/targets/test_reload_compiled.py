# SPDX-License-Identifier: Apache-2.0
"""Packed weights of `test_reload` in a compiled engine."""

from __future__ import annotations

import pytest

from tests.e2e.reloads import packed_weights_follow

pytestmark = [pytest.mark.e2e, pytest.mark.own_process, pytest.mark.full]


def test_compiled_engines_read_the_new_packed_weights() -> None:
    packed_weights_follow("tied", enforce_eager=False)
