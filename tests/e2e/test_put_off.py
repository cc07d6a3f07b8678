# SPDX-License-Identifier: Apache-2.0
"""Draft contexts that wait until drafts pay, or are never computed."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("put_off_checks")]


@pytest.mark.parametrize("name", written_checks("put_off_checks"))
def test_put_off(name: str) -> None:
    assert_check("tests.e2e.put_off_checks", name)
