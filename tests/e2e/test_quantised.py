# SPDX-License-Identifier: Apache-2.0
"""Targets with quantised weights on small random models."""

from __future__ import annotations

import pytest

from tests.e2e import quantised_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("quantised_checks")]


@pytest.mark.parametrize("name", check_names(quantised_checks))
def test_quantised_targets_are_served_like_plain_vllm(name: str) -> None:
    assert_check("tests.e2e.quantised_checks", name)
