# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a small random target, float32."""

from __future__ import annotations

import pytest

from tests.e2e import adapter_checks, adapter_method_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("adapter_checks")]


@pytest.mark.parametrize("name", check_names(adapter_checks))
def test_each_request_is_answered_by_its_adapter(name: str) -> None:
    assert_check("tests.e2e.adapter_checks", name)


@pytest.mark.full
@pytest.mark.parametrize("name", check_names(adapter_method_checks))
def test_every_method_drafts_beside_adapters(name: str) -> None:
    assert_check("tests.e2e.adapter_method_checks", name)
