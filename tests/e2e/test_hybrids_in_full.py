# SPDX-License-Identifier: Apache-2.0
"""More of test_hybrids.py: images, other drafters, grammars, bfloat16."""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("hybrid_checks")]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in ("qwen3_5_image_checks", "hybrid_full_checks", "hybrid_bf16_checks")
        for name in written_checks(module)
    ],
)
def test_equals_plain_decoding(module: str, name: str) -> None:
    assert_check(f"tests.e2e.{module}", name, timeout_s=1500)
