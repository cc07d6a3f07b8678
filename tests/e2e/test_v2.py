# SPDX-License-Identifier: Apache-2.0
"""Trees on vLLM's Model Runner V2, with the scheduler waiting for every step and ahead of it.

Both engines of a comparison run V2 with vLLM's own kernels, in Triton's interpreter.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.pair import assert_check

pytestmark = [pytest.mark.e2e]

# Importing the module would change how vLLM is imported here.
_SOURCE = Path(__file__).with_name("v2_checks.py").read_text()
CHECKS = re.findall(r"^def (check_\w+)", _SOURCE, re.MULTILINE)


@pytest.mark.xdist_group("v2_checks")
@pytest.mark.parametrize("name", CHECKS)
def test_v2(name: str) -> None:
    assert_check("tests.e2e.v2_checks", name, fresh=True)
