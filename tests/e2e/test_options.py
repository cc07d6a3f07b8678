# SPDX-License-Identifier: Apache-2.0
"""Every sampling and output option on trees gives what plain decoding gives.

A random small target with a tokenizer, float32; drafts by an oracle, so that accepted runs are
long and trees branch. Each check fails as well when nothing was accepted or no tree branched.
"""

from __future__ import annotations

import pytest

from tests.e2e import option_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("option_checks")]


@pytest.mark.parametrize("name", check_names(option_checks))
def test_output_equals_plain_decoding(name: str) -> None:
    assert_check("tests.e2e.option_checks", name)
