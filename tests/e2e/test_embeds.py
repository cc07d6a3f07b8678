# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt holds embeddings are decoded plainly: a drafter never sees their rows."""

from __future__ import annotations

import pytest

from tests.e2e import embeds_checks
from tests.e2e.pair import assert_check, check_names

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("embeds_checks")]


@pytest.mark.parametrize("name", check_names(embeds_checks))
def test_prompt_embeds(name: str) -> None:
    assert_check("tests.e2e.embeds_checks", name)
