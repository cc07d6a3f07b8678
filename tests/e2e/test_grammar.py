# SPDX-License-Identifier: Apache-2.0
"""Structured output on trees: masked per node by the grammar, equal to plain decoding."""

from __future__ import annotations

import pytest

from tests.e2e import grammar_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("grammar_checks")]


@pytest.mark.parametrize("name", check_names(grammar_checks))
def test_output_equals_plain_decoding(name: str) -> None:
    assert_check("tests.e2e.grammar_checks", name)
