# SPDX-License-Identifier: Apache-2.0
"""Multimodal targets on small random models, float32."""

from __future__ import annotations

import pytest

from tests.e2e import vision_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("vision_checks")]


@pytest.mark.parametrize("name", check_names(vision_checks))
def test_images_and_text_are_answered_alike(name: str) -> None:
    assert_check("tests.e2e.vision_checks", name)


def test_mistral_small_3() -> None:
    assert_check("tests.e2e.mistral3_checks", "check_images_of_any_shape")


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("mistral3_checks", "check_prefix_hits_chunks_and_preemption_with_images"),
        ("wrapper_checks", "check_text_behind_a_wrapper"),
    ],
)
def test_wrappers_with_positions_on_one_axis(module: str, name: str) -> None:
    assert_check(f"tests.e2e.{module}", name)
