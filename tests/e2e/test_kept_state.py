# SPDX-License-Identifier: Apache-2.0
"""A server that goes idle keeps nothing of the requests that it served."""

from __future__ import annotations

import pytest

from tests.e2e import kept_state_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("kept_state_checks")]


@pytest.mark.parametrize("name", check_names(kept_state_checks))
def test_nothing_is_kept(name: str) -> None:
    assert_check("tests.e2e.kept_state_checks", name)
