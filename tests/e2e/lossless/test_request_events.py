# SPDX-License-Identifier: Apache-2.0
"""Many requests, and prompts of the least and the most tokens, against plain decoding. What may
happen to requests while they run happens in tests/fuzz."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.pair import (
    ENGINE,
    both_schedulers,
    core_of,
    make_engine,
    scheduled,
)
from tests.e2e.requests import greedy

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


def _free_blocks(llm: Any) -> int:
    pool = core_of(llm).scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return pool.get_num_free_blocks()


def test_hundreds_of_tiny_requests() -> None:
    prompts = [[6 + i % 300] for i in range(400)]
    for engines in both_schedulers():
        outputs, _ = engines.compare(prompts, greedy(max_tokens=4))
        assert len(outputs) == 400
        _free_blocks(engines.tree)
        assert len(engines.runner.req_states.req_id_to_index) <= ENGINE["max_num_seqs"]


def test_prompts_of_one_token_and_of_the_whole_context() -> None:
    longest = int(ENGINE["max_model_len"])
    prompts = [[8], list(range(6, 6 + longest - 1)), list(range(6, 6 + longest - 2)),
               list(range(6, 6 + longest - 20))]  # fmt: skip
    for method, ahead in (("oracle", False), ("oracle", True), ("jetspec", True)):
        outputs, _ = scheduled(ahead, method, tree={"max_num_batched_tokens": 100}).compare(
            prompts, greedy(max_tokens=300)
        )
        lengths = [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs]
        assert lengths == [longest] * 4
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_sleep_is_vllms_to_refuse() -> None:
    """CPU has no sleep mode, with trees or without: both engines say so."""
    for method in (None, "oracle"):
        with pytest.raises(Exception, match="(?i)sleep"):
            make_engine(method, enable_sleep_mode=True)
