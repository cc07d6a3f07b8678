# SPDX-License-Identifier: Apache-2.0
"""Targets with multi-head latent attention: trees give what plain decoding gives."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("latent_checks")]


@pytest.mark.parametrize("name", written_checks("latent_checks"))
def test_equals_plain_decoding(name: str) -> None:
    assert_check("tests.e2e.latent_checks", name)
