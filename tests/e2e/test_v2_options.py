# SPDX-License-Identifier: Apache-2.0
"""Options that depend on what was generated, and grammars, on trees of the V2 runner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.pair import assert_check

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("v2_option_checks")]

# Importing the module would choose a model runner for this process.
_SOURCE = Path(__file__).with_name("v2_option_checks.py").read_text()
CHECKS = re.findall(r"^def (check_\w+)", _SOURCE, re.MULTILINE)


@pytest.mark.parametrize("name", CHECKS)
def test_output_equals_plain_decoding(name: str) -> None:
    assert_check("tests.e2e.v2_option_checks", name)
