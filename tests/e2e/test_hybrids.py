# SPDX-License-Identifier: Apache-2.0
"""Targets of attention and Gated DeltaNet layers: trees give what plain decoding gives."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("hybrid_checks")]


@pytest.mark.parametrize("name", written_checks("hybrid_checks"))
def test_equals_plain_decoding(name: str) -> None:
    assert_check("tests.e2e.hybrid_checks", name)


@pytest.mark.parametrize("name", written_checks("qwen3_5_checks"))
def test_qwen3_5(name: str) -> None:
    assert_check("tests.e2e.qwen3_5_checks", name)
