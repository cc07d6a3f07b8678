# SPDX-License-Identifier: Apache-2.0
"""Draft contexts that wait until drafts pay, or are never computed."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("module", ["put_off_checks", "v2_put_off_checks"])
@pytest.mark.xdist_group("set_deferred")
def test_put_off(module: str) -> None:
    for name in written_checks(module):
        assert_check(f"tests.e2e.{module}", name)
