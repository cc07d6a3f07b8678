# SPDX-License-Identifier: Apache-2.0
"""In bfloat16 a text depends neither on what is drafted for it nor on who shares its steps, where
the target's products are packed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.harness import DEFAULTS, assert_drafted, engine_args, prompts, run_engine
from vllm_specplug.kernels.packed_linear import packs_target
from vllm_specplug.options import REQUEST_BUDGET_ARG

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.xdist_group("same_text"),
    pytest.mark.skipif(
        not packs_target("auto"), reason="products of vLLM's depend on the rows of a step"
    ),
]

COUNT = 3
NODES = 16
DRAFTED = "vllm:spec_decode_num_draft_tokens"
CALL_NAMES = ("without drafts", "with full trees", "by default")


def _call(first: int, last: int, budget: int | str) -> dict[str, Any]:
    """Greedy and seeded requests in turn."""
    each = [
        {"max_tokens": 36, "ignore_eos": True, "temperature": 0.0 if i % 2 else 0.8, "seed": i,
         "extra_args": {REQUEST_BUDGET_ARG: budget}}
        for i in range(first, last)
    ]  # fmt: skip
    return {"prompts": prompts(last)[first:], "params": each}


def _engine(max_num_seqs: int, **more: Any) -> dict[str, Any]:
    return engine_args(dtype="bfloat16", max_num_seqs=max_num_seqs, **more)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_text_is_one_text(eager: bool) -> None:
    """Alone without drafts; and in company without drafts, with full trees, as users get them."""
    calls = [_call(i, i + 1, 0) for i in range(COUNT)]
    calls += [_call(0, COUNT, budget) for budget in (0, NODES, "auto")]
    # Fewer at once than there are: prompts join the steps of others.
    engine = _engine(2, enforce_eager=eager)
    result = run_engine(engine, calls, speculative=DEFAULTS["jetspec"])
    assert_drafted(result)
    assert result.call_counter(COUNT, DRAFTED) == 0
    assert result.call_counter(COUNT + 1, DRAFTED) > 450
    alone = [result.token_ids(i)[0] for i in range(COUNT)]
    for call in range(COUNT, COUNT + 3):
        assert result.token_ids(call) == alone, CALL_NAMES[call - COUNT]


def test_ancestors_in_the_order_of_slots_would_show() -> None:
    calls = [_call(0, 12, budget) for budget in (0, NODES)]
    engine = _engine(12)
    result = run_engine(engine, calls, speculative=DEFAULTS["jetspec"], sabotage=("order",))
    assert_drafted(result)
    assert result.token_ids(0) != result.token_ids(1)
