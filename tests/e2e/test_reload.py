# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced while an engine lives, by `reload_weights` and by a trainer."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = [pytest.mark.e2e]


@pytest.mark.xdist_group("reload_checks")
@pytest.mark.parametrize("name", written_checks("reload_checks"))
def test_new_weights_are_served(name: str) -> None:
    assert_check("tests.e2e.reload_checks", name)


@pytest.mark.full
@pytest.mark.parametrize("name", written_checks("reload_compiled_checks"))
def test_new_weights_are_served_by_a_compiled_engine(name: str) -> None:
    assert_check("tests.e2e.reload_compiled_checks", name)
