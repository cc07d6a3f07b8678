# SPDX-License-Identifier: Apache-2.0
"""Targets of attention and Gated DeltaNet layers: trees on V2 give what plain decoding gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.pair import assert_check

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("hybrid_checks")]

# Importing the module would put kernels in place here.
_SOURCE = Path(__file__).with_name("hybrid_checks.py").read_text()
CHECKS = re.findall(r"^def (check_\w+)", _SOURCE, re.MULTILINE)


@pytest.mark.parametrize("name", CHECKS)
def test_on_v2(name: str) -> None:
    assert_check("tests.e2e.hybrid_checks", name)
