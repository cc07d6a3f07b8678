# SPDX-License-Identifier: Apache-2.0
"""Drafted tokens whose hidden states are NaN."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("nonfinite_checks")]


@pytest.mark.parametrize("name", written_checks("nonfinite_checks"))
def test_they_change_no_other_branch(name: str) -> None:
    assert_check("tests.e2e.nonfinite_checks", name)
