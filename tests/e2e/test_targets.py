# SPDX-License-Identifier: Apache-2.0
"""Targets of other families on small random models, float32."""

from __future__ import annotations

import pytest

from tests.e2e import target_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("target_checks")]


@pytest.mark.parametrize("name", check_names(target_checks))
def test_targets_are_served_right_or_refused(name: str) -> None:
    assert_check("tests.e2e.target_checks", name)
