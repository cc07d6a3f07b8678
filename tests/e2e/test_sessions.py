# SPDX-License-Identifier: Apache-2.0
"""Sessions whose input goes on after an answer."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("session_checks")]


@pytest.mark.parametrize("name", written_checks("session_checks"))
def test_output_equals_plain_decoding(name: str) -> None:
    assert_check("tests.e2e.session_checks", name)
