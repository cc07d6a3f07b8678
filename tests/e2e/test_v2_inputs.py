# SPDX-License-Identifier: Apache-2.0
"""Images in prompts, and input that goes on after an answer, on trees of the V2 runner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.pair import assert_check

pytestmark = [pytest.mark.e2e]

# Importing the modules would choose a model runner for this process.
CHECKS = [
    pytest.param(module, name, marks=pytest.mark.xdist_group(module))
    for module in ("v2_vision_checks", "v2_session_checks")
    for name in re.findall(
        r"^def (check_\w+)", Path(__file__).with_name(f"{module}.py").read_text(), re.MULTILINE
    )
]


@pytest.mark.parametrize(("module", "name"), CHECKS)
def test_output_equals_plain_decoding(module: str, name: str) -> None:
    assert_check(f"tests.e2e.{module}", name)
