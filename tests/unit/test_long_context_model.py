# SPDX-License-Identifier: Apache-2.0
"""The model of drafts over long contexts: the docs have its table, and it says what it should."""

from __future__ import annotations

import pytest

from tests.unit.scripts import load_script

model = load_script("long_context_model")


def test_the_docs_hold_the_page() -> None:
    assert model.PAGE.read_text() == model.page(model.H100), (
        "run scripts/long_context_model.py --write"
    )


@pytest.mark.parametrize("batch", [1, 8])
def test_what_grows_with_the_context(batch: int) -> None:
    costs = {
        name: [model.in_plain_steps(name, c, batch, model.H100) for c in model.CONTEXTS]
        for name in model.DRAFTS
    }
    # One more pass over the target's weights; the longer the context, the less they weigh.
    own = costs["tokenswift, self"]
    assert own == sorted(own, reverse=True) and 1.9 < own[0] < 2.5 and own[-1] < 1.6
    assert all(costs["n-grams"][i] == min(of[i] for of in costs.values()) for i in range(5))
    # One more layer over the context per level, and what it keeps does not grow.
    caches = [model.DRAFTS["longspec"].cache(c) for c in model.CONTEXTS]
    assert len({*caches}) == 1
    blocks = [model.DRAFTS["jetspec"].cache(c) for c in model.CONTEXTS]
    assert [b / c for b, c in zip(blocks, model.CONTEXTS, strict=True)] == [20480] * 5
