# SPDX-License-Identifier: Apache-2.0
"""Multimodal targets on small random models, float32."""

from __future__ import annotations

import pytest

from tests.e2e import vision_checks
from tests.e2e.pair import assert_check, check_names, written_checks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("vision_checks")]


@pytest.mark.parametrize("name", check_names(vision_checks))
def test_images_and_text_are_answered_alike(name: str) -> None:
    assert_check("tests.e2e.vision_checks", name)


def test_mistral_small_3() -> None:
    assert_check("tests.e2e.mistral3_checks", "check_images_of_any_shape")


@pytest.mark.full
@pytest.mark.parametrize("name", written_checks("v2_mistral3_checks"))
def test_mistral_small_3_on_v2(name: str) -> None:
    assert_check("tests.e2e.v2_mistral3_checks", name)


@pytest.mark.full
@pytest.mark.parametrize("module", ["wrapper_checks", "v2_wrapper_checks"])
def test_wrappers_with_positions_on_one_axis(module: str) -> None:
    for name in written_checks(module):
        assert_check(f"tests.e2e.{module}", name)
