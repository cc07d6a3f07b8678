# SPDX-License-Identifier: Apache-2.0
"""DFlash heads that are saved here are those of vLLM's own method."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("dflash")]


@pytest.mark.parametrize("name", written_checks("dflash_checks"))
def test_chains(name: str) -> None:
    assert_check("tests.e2e.dflash_checks", name)
