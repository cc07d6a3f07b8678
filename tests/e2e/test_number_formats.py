# SPDX-License-Identifier: Apache-2.0
"""float16 and KV caches of 8 bits on small random models."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("number_format_checks")]


@pytest.mark.parametrize("name", written_checks("number_format_checks"))
def test_number_formats(name: str) -> None:
    assert_check("tests.e2e.number_format_checks", name)
