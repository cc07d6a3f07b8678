# SPDX-License-Identifier: Apache-2.0
"""float16 and KV caches of 8 bits on small random models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e import number_format_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = [pytest.mark.e2e]

# Importing the module would put kernels in place here.
_SOURCE = Path(__file__).with_name("number_format_v2_checks.py").read_text()
V2_CHECKS = re.findall(r'^    "(check_\w+)"', _SOURCE, re.MULTILINE)


@pytest.mark.xdist_group("number_format_checks")
@pytest.mark.parametrize("name", check_names(number_format_checks))
def test_number_formats(name: str) -> None:
    assert_check("tests.e2e.number_format_checks", name)


@pytest.mark.xdist_group("number_format_v2_checks")
@pytest.mark.parametrize("name", V2_CHECKS)
def test_number_formats_on_v2(name: str) -> None:
    assert_check("tests.e2e.number_format_v2_checks", name)
