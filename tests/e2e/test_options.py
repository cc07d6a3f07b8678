# SPDX-License-Identifier: Apache-2.0
"""Every sampling and output option on trees gives what plain decoding gives.

A random small target with a tokenizer, float32; drafts by an oracle, so that accepted runs are
long and trees branch. Each check fails as well when nothing was accepted or no tree branched.
"""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, marks=pytest.mark.xdist_group(module))
        for module in ("option_checks", "path_checks")
        for name in written_checks(module)
    ],
)
def test_output_equals_plain_decoding(module: str, name: str) -> None:
    assert_check(f"tests.e2e.{module}", name)
