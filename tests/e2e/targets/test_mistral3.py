# SPDX-License-Identifier: Apache-2.0
"""Mistral-Small 3 with images in its prompts, on trees against plain decoding.

Images come as what the image processor makes of them (`test_vision`): a Pixtral tower takes
pictures of any shape, and text tokens end the rows of their patches.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.mistral3 import mistral3_target, prompts, without_processors
from tests.e2e.pair import Pair, pair
from tests.e2e.vision import compare

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


def engines(**tree: Any) -> Pair:
    with without_processors():
        return pair("oracle", model=mistral3_target(), limit_mm_per_prompt={"image": 2}, tree=tree)


def test_images_of_any_shape() -> None:
    for ahead in (False, True):
        made = engines(async_scheduling=ahead)
        expected, counts = compare(made, prompts())
        # The same text around another image.
        assert expected[4].outputs[0].token_ids != expected[7].outputs[0].token_ids
        assert (counts.stale > 0) == ahead and counts.skipping > 0, counts
    with (
        patch.object(made.runner.tree_backend, "compact", lambda *args: None),
        pytest.raises(AssertionError, match="differs"),
    ):
        compare(made, prompts())
