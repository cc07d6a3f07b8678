# SPDX-License-Identifier: Apache-2.0
"""What happens to an engine while requests run, against plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.pair import (
    ENGINE,
    both_schedulers,
    core_of,
    generate,
    make_engine,
    scheduled,
    watch_preemptions,
    watch_prefix_hits,
)
from tests.e2e.requests import LONG, PROMPTS, greedy, seeded

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


def _free_blocks(llm: Any) -> int:
    pool = core_of(llm).scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return pool.get_num_free_blocks()


def test_cache_exhausted_by_many_requests() -> None:
    for method, ahead in (("oracle", False), ("jetspec", True)):
        engines = scheduled(ahead, method, tree={"num_gpu_blocks_override": 9})
        preempted = watch_preemptions(engines.tree)
        engines.compare(LONG, greedy(max_tokens=90))
        assert preempted
        _free_blocks(engines.tree)


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


def test_chunked_prompts_beside_decoding() -> None:
    for engines in both_schedulers(tree={"max_num_batched_tokens": 40}):
        engines.compare(
            LONG + PROMPTS,
            [*(greedy(max_tokens=30) for _ in LONG), *(seeded(i) for i in range(4))],
        )


def test_prefix_hits_and_reset() -> None:
    """Whole blocks of generated text, too, which compaction wrote."""
    for method, ahead in (("oracle", False), ("jetspec", True)):
        engines = scheduled(ahead, method, tree={"enable_prefix_caching": True})
        tree = engines.tree
        first, counts = engines.compare(LONG, greedy(max_tokens=50))
        assert counts.skipping > 3, counts
        longer = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in first]
        hits = watch_prefix_hits(tree)
        engines.compare(longer, greedy(max_tokens=20))
        # Prompts had 70 tokens, two blocks of 32: a third block holds generated text.
        assert len(hits) == len(LONG) and min(hits.values()) >= 96, hits
        assert tree.reset_prefix_cache()
        hits.clear()
        engines.compare(LONG[:1], greedy(max_tokens=20))
        assert set(hits.values()) == {0}, hits
        _free_blocks(tree)


def test_requests_aborted_at_every_step() -> None:
    for engines in both_schedulers():
        expected, _ = engines.compare(PROMPTS, greedy())
        answers = [list(o.outputs[0].token_ids) for o in expected]
        engine = engines.tree.llm_engine
        for abort_at in range(1, 8):
            for i, prompt in enumerate(PROMPTS):
                engine.add_request(f"a{abort_at}-{i}", {"prompt_token_ids": prompt}, greedy())
            finished = {}
            for step in range(100):
                if step == abort_at:
                    engine.abort_request([f"a{abort_at}-1", f"a{abort_at}-2"])
                for output in engine.step():
                    if output.finished:
                        finished[output.request_id] = list(output.outputs[0].token_ids)
                if not engine.has_unfinished_requests():
                    break
            for i in (0, 3):
                assert finished[f"a{abort_at}-{i}"] == answers[i]
            _free_blocks(engines.tree)
        assert len(engines.runner.speculator.extra_args) <= ENGINE["max_num_seqs"]


def test_sleep_is_vllms_to_refuse() -> None:
    """CPU has no sleep mode, with trees or without: both engines say so."""
    for method in (None, "oracle"):
        with pytest.raises(Exception, match="(?i)sleep"):
            make_engine(method, enable_sleep_mode=True)


def test_drafting_pays_nothing_it_cannot() -> None:
    """Budget 0 for a request is plain decoding of that request, whatever runs beside it."""
    params = [greedy(extra_args={"specplug_tree_budget": 0}) for _ in PROMPTS]
    mixed = [greedy(extra_args={"specplug_tree_budget": n}) for n in (0, 2, 4)]
    for engines in both_schedulers():
        engines.take_counts()
        generate(engines.tree, PROMPTS, params)
        assert engines.take_counts().nodes == 0
        engines.compare(PROMPTS, [*mixed, greedy()])
