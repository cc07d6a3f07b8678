# SPDX-License-Identifier: Apache-2.0
"""The adaptive budget follows the load and requests' wishes, and never changes an output."""

from __future__ import annotations

import pytest

from tests.e2e import budget_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = pytest.mark.e2e


@pytest.mark.xdist_group("budget")
@pytest.mark.parametrize("name", check_names(budget_checks))
def test_budget(name: str) -> None:
    assert_check("tests.e2e.budget_checks", name)
