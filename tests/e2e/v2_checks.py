# SPDX-License-Identifier: Apache-2.0
"""Trees on Model Runner V2 against plain V2; see test_v2.py.

Without a Triton for CPUs, both take the kernels that stand in for vLLM's, which have tests of
their own. With SPECPLUG_INTERPRETED_V2=1, to be set before vLLM is imported, both take vLLM's, in
Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

if os.environ.get("SPECPLUG_INTERPRETED_V2") == "1":
    from tests.e2e import interpreted_v2

    interpreted_v2.install()

import pytest
import torch

from tests.e2e import adapter_checks
from tests.e2e.adapter_checks import (
    LORA,
    adapters,
    assert_costs_are_measured_with_adapters,
    compare_adapters,
    mapped,
    of_the_next_row,
)
from tests.e2e.budget_checks import FLAT, STEEP, freeze_costs
from tests.e2e.eagle3_checks import compare_drafts_after_steps_without_any
from tests.e2e.event_checks import LONG
from tests.e2e.option_checks import PROMPTS, greedy, seeded
from tests.e2e.pair import (
    Counts,
    Pair,
    assert_same_output,
    core_of,
    generate,
    head_options,
    pair,
    sequences_of,
    watch_prefix_hits,
)
from tests.e2e.target_checks import (
    WINDOW_PROMPTS,
    around_windows,
    diverges,
    engine_of,
    moved_for_each_layer,
    windows_from_slots,
)
from vllm_specplug.vllm_v2.plain_engine import use_v2
from vllm_specplug.vllm_worker.calibration import start_budget

use_v2()
# Many engines in one process: small caches.
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
CACHE = {"kv_cache_memory_bytes": 1 << 24}
MIXED = [greedy(max_tokens=24), *(seeded(i, max_tokens=24) for i in range(3))]


def engines(
    method: str = "oracle",
    *,
    ahead: bool = True,
    budget: int | str = 6,
    ngram_topk: int = 3,
    both: dict[str, Any] | None = None,
    model: str | None = None,
    **tree: Any,
) -> Pair:
    """A pair whose tree engine schedules ahead or does not; six nodes per tree at most. `model`
    takes the place of the method's own head."""
    options = {"num_speculative_tokens": 6, "tree_budget": budget, "ngram_topk": ngram_topk}
    options |= {} if model is None else {"model": model}
    made = pair(
        method,
        speculative=options,
        tree={"async_scheduling": ahead, **tree},
        **CACHE,
        **both or {},
    )
    core = core_of(made.tree)
    assert type(core.scheduler).__name__ == ("AsyncScheduler" if ahead else "Scheduler")
    assert type(made.runner).__mro__[2].__module__ == "vllm.v1.worker.cpu.model_runner"
    return made


def _compare(method: str, ahead: bool, model: str | None = None) -> Counts:
    made = engines(method, ahead=ahead, model=model)
    _, counts = made.compare(PROMPTS[:4], MIXED)
    # Steps that were prepared ahead, or none.
    assert (counts.stale > 0) == ahead, counts
    return counts


def check_greedy_and_seeded() -> None:
    assert _compare("oracle", ahead=False).skipping > 3


def check_greedy_and_seeded_scheduled_ahead() -> None:
    assert _compare("oracle", ahead=True).skipping > 3


def check_causal_block_head_and_ngrams() -> None:
    for ahead in (False, True):
        _compare("jetspec", ahead)


def check_bidirectional_block_head_and_ngrams() -> None:
    _compare("ddtree", ahead=True)


def check_ngram_branches() -> None:
    for ahead in (False, True):
        _compare("ngram_tree", ahead)


def check_host_branches() -> None:
    _compare("dels", ahead=True)


def check_a_local_head_behind_a_causal_block() -> None:
    causal = str(head_options("jetspec")["model"])
    for ahead in (False, True):
        _compare("dels", ahead, causal)
    drafter = engines("dels", model=causal).runner.speculator.proposer.drafter
    assert drafter.config.causal and drafter.local_tree is not None
    assert not drafter.local_tree.is_idle


def check_windows() -> None:
    """Kept beside the pages, dropped with a request, computed again when it returns."""
    for ahead in (False, True):
        _compare("longspec", ahead)
    made = engines("longspec", num_gpu_blocks_override=9)
    with preemptions(made.tree) as preempted:
        made.compare(LONG[:3], greedy(max_tokens=70))
    assert preempted


@contextmanager
def calls(owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of the calls of an object's method."""
    method, seen = getattr(owner, name), []

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return method(*args, **kwargs)

    setattr(owner, name, noted)
    try:
        yield seen
    finally:
        delattr(owner, name)


def check_drafts_of_the_target_itself() -> None:
    """Over a partial cache of 40 tokens, smaller than the contexts, chosen again after 7."""
    for ahead in (False, True):
        made = engines("tokenswift", ahead=ahead)
        drafter = made.runner.drafter.drafter
        pool = drafter.target_forward.pool
        drafter.steps_from.clear()
        with calls(pool, "choose") as chosen:
            made.compare([LONG[0], *PROMPTS[:3]], MIXED)
        assert set(drafter.steps_from) == {"self"} and len(chosen) >= 4, drafter.steps_from
        # The next step drops what ended.
        generate(made.tree, PROMPTS[:1], greedy(max_tokens=2))
        assert len(pool._free) == pool.max_requests and not pool._contexts
    made = engines("tokenswift", num_gpu_blocks_override=9)
    with preemptions(made.tree) as preempted:
        made.compare(LONG[:3], greedy(max_tokens=70))
    assert preempted


def check_heads_that_read_the_next_token() -> None:
    for ahead in (False, True):
        _compare("eagle3_tree", ahead)


def check_context_that_waits_for_a_draft() -> None:
    compare_drafts_after_steps_without_any(async_scheduling=False, **CACHE)


def check_chunked_prompts_beside_decoding() -> None:
    made = engines(max_num_batched_tokens=40)
    made.compare(LONG[:4] + PROMPTS[:3], [*(greedy(max_tokens=16) for _ in range(4)), *MIXED[:3]])


@contextmanager
def preemptions(llm: Any) -> Iterator[list[str]]:
    scheduler = core_of(llm).scheduler
    preempted: list[str] = []
    original = scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = noted
    try:
        yield preempted
    finally:
        scheduler._preempt_request = original


def check_preemption() -> None:
    for method, ahead in (("oracle", False), ("jetspec", True)):
        made = engines(method, ahead=ahead, num_gpu_blocks_override=9)
        with preemptions(made.tree) as preempted:
            made.compare(LONG[:3], greedy(max_tokens=70))
        assert preempted


def check_prefix_hits_on_generated_text() -> None:
    """Whole blocks of it, written by compaction."""
    for method, ahead in (("oracle", False), ("jetspec", True)):
        made = engines(method, ahead=ahead, enable_prefix_caching=True)
        first, counts = made.compare(LONG[:2], greedy(max_tokens=48))
        assert counts.skipping > 3
        hits = watch_prefix_hits(made.tree)
        made.compare(sequences_of(first), greedy(max_tokens=12))
        # Prompts had 70 tokens, two blocks of 32: a third block holds generated text.
        assert len(hits) == 2 and min(hits.values()) >= 96, hits


def check_a_prefix_hit_that_leaves_one_token() -> None:
    """vLLM would pad such a request with drafts that nobody proposed."""
    made = engines(enable_prefix_caching=True, async_scheduling=True)
    prompt = list(range(30, 63))
    made.compare([prompt], greedy(max_tokens=8))
    made.compare([prompt, *PROMPTS[:2]], greedy(max_tokens=8))


def check_full_prefix_hits_of_prompts_in_pieces() -> None:
    """Prompts of whole blocks, cached but for the last token or block, that are cut into pieces
    beside requests that decode."""
    for method, ahead in (("oracle", False), ("oracle", True), ("jetspec", True),
                          ("eagle3_tree", False), ("longspec", True)):  # fmt: skip
        made = engines(
            method, ahead=ahead, enable_prefix_caching=True, max_num_batched_tokens=64,
            long_prefill_token_threshold=10, num_gpu_blocks_override=24,
        )  # fmt: skip
        text = [6 + i % 50 for i in range(129)]
        prompts = [text[:128], text, text[:97], *PROMPTS[:3]]
        hits = watch_prefix_hits(made.tree)
        made.compare(prompts, greedy(max_tokens=12))
        assert not any(hits.values()), hits
        # All of them again, and a second time with seeds.
        for params in (greedy(max_tokens=12), seeded(4, max_tokens=12)):
            hits.clear()
            made.compare([*prompts, text[:65]], params)
            # A head that reads the next token has the last block computed again.
            again = 32 if method == "eagle3_tree" else 0
            assert sorted(n + again for n in hits.values())[-4:] == [64, 96, 96, 128], hits


def check_sampling_options() -> None:
    made = engines()
    options: list[dict[str, Any]] = [
        {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"logit_bias": {7: 3.0, 9: -5.0}},
        {"min_tokens": 12, "stop_token_ids": [7, 8, 9]}, {"allowed_token_ids": [5, 6, 7, 8, 9]},
    ]  # fmt: skip
    prompts = [PROMPTS[i % 4] for i in range(len(options))]
    params = [seeded(i, max_tokens=20, temperature=0.9, **o) for i, o in enumerate(options)]
    made.compare(prompts, params)


def check_options_that_read_earlier_tokens() -> None:
    """Those of a node's path, in a tree that holds true tokens of other depths."""
    for ahead in (False, True):
        made = engines(ahead=ahead)
        params = [
            greedy(repetition_penalty=1.4), greedy(presence_penalty=0.9, frequency_penalty=0.6),
            seeded(1, presence_penalty=0.7, repetition_penalty=1.2),
            greedy(bad_words=["e", "the", "er"]),
        ]  # fmt: skip
        _, counts = made.compare(PROMPTS[:4], params)
        assert counts.skipping > 3, counts


def check_logprobs() -> None:
    """With those of an accepted token from the row above it."""
    for ahead in (False, True):
        _, counts = engines(ahead=ahead).compare(
            PROMPTS[:4],
            [greedy(max_tokens=16, logprobs=2), seeded(1, max_tokens=16, logprobs=0),
             greedy(max_tokens=16), seeded(2, max_tokens=16, logprobs=4, prompt_logprobs=1)],
        )  # fmt: skip
        assert counts.skipping > 0


def check_a_grammar() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    for ahead in (False, True):
        made = engines(ahead=ahead)
        params = [
            greedy(structured_outputs=StructuredOutputsParams(regex="[a-c ]{8,9}"), max_tokens=12,
                   ignore_eos=False),
            greedy(max_tokens=12),
        ]  # fmt: skip
        made.compare(PROMPTS[:2], params)


def windowed(family: str, *, ahead: bool, **engine: Any) -> Pair:
    options = {"num_speculative_tokens": 12, "tree_budget": 12}
    tree = {"async_scheduling": ahead, **engine.pop("tree", {})}
    return pair("oracle", speculative=options, tree=tree, **CACHE, **engine, **engine_of(family))


def check_windows_in_several_groups() -> None:
    """Compaction moves each group's slots by its own block table."""
    for family, ahead in (("Gemma3Text", False), ("Mistral", True)):
        made = windowed(family, ahead=ahead)
        assert around_windows(made).skipping > 10
        with windows_from_slots():
            diverges(made)


def check_shared_caches_and_heads_of_several_shapes() -> None:
    """A cache that two layers read is moved once."""
    for family, ahead in (("Gemma3nText", False), ("Gemma4Text", True)):
        made = windowed(family, ahead=ahead)
        assert around_windows(made).skipping > 10
        with moved_for_each_layer(made):
            diverges(made)


def check_prefix_hits_and_preemption_with_windows() -> None:
    made = windowed("Gemma3Text", ahead=True, tree={"enable_prefix_caching": True})
    first, _ = made.compare(WINDOW_PROMPTS[3:], greedy(max_tokens=50, detokenize=False))
    hits = watch_prefix_hits(made.tree)
    made.compare(sequences_of(first), greedy(max_tokens=12, detokenize=False))
    assert max(hits.values()) >= 128, hits
    made = windowed("Gemma3Text", ahead=True, num_gpu_blocks_override=28)
    with preemptions(made.tree) as preempted:
        made.compare(WINDOW_PROMPTS[3:], greedy(max_tokens=70, detokenize=False))
    assert preempted


def check_budgets_of_requests() -> None:
    made = engines()
    params = [greedy(max_tokens=12, extra_args={"specplug_tree_budget": n}) for n in (0, 2, 4, 6)]
    made.compare(PROMPTS[:4], params)
    alone = [greedy(max_tokens=12, extra_args={"specplug_tree_budget": 0})]
    generate(made.tree, PROMPTS[:1], alone)
    assert made.take_counts().nodes == 0


def adaptive_engines(costs: Any, method: str = "oracle", **options: Any) -> Pair:
    made = engines(method, budget="auto", **options)
    # Measured at start, or read from what an engine before it measured.
    assert made.runner.planner.adaptive is not None
    freeze_costs(made, costs)
    return made


@contextmanager
def verified_steps(made: Pair) -> Iterator[list[dict[str, tuple[int, int]]]]:
    """Of each step, the rows of its requests and the nodes of their trees."""
    planner = made.runner.planner
    steps: list[dict[str, tuple[int, int]]] = []
    original = planner.observe

    def noted(step: Any, req_ids: list[str], *args: Any) -> None:
        found = [(r.end_row - r.root_row, r.tree.num_nodes) for r in step.requests]
        steps.append(dict(zip(req_ids, found, strict=True)))
        original(step, req_ids, *args)

    planner.observe = noted
    try:
        yield steps
    finally:
        del planner.observe


def _full_steps(made: Pair) -> list[dict[str, tuple[int, int]]]:
    """Compares four requests; the steps with all of them, but for the first three. Where steps are
    prepared ahead, those are before anything was decided."""
    with verified_steps(made) as steps:
        _, counts = made.compare(PROMPTS[:4], MIXED)
    assert counts.skipping > 3, counts
    return [step for step in steps if len(step) == 4][3:]


def _most_rows(steps: list[dict[str, tuple[int, int]]]) -> int:
    return max(sum(rows for rows, _ in step.values()) for step in steps)


def check_adaptive_budgets() -> None:
    """Costs allow twelve rows, of 28 that four requests could have."""
    for ahead in (False, True):
        made = adaptive_engines(STEEP, ahead=ahead)
        steps = _full_steps(made)
        speculator = made.runner.speculator
        assert (speculator.reserved is not None) == ahead
        # The next step drops what ended.
        generate(made.tree, PROMPTS[:1], greedy(max_tokens=2))
        assert len(speculator.trees) == 1
        assert not ahead or len(speculator.reserved.by_request) == 1
        nodes = [tuple(nodes for _, nodes in step.values()) for step in steps]
        assert any(len(set(of_requests)) > 1 for of_requests in nodes), nodes
        assert len(set(nodes)) > 2, nodes
        assert 4 < _most_rows(steps) <= 12, steps


def check_it_would_notice_rows_that_stay_reserved() -> None:
    import vllm_specplug.vllm_process.metrics_bridge as bridge

    stock = bridge.keep_reserved_rows
    bridge.keep_reserved_rows = lambda *args: None
    try:
        assert _most_rows(_full_steps(adaptive_engines(STEEP, ahead=True))) == 28
    finally:
        bridge.keep_reserved_rows = stock


def check_adaptive_budgets_of_a_head() -> None:
    for ahead in (False, True):
        made = adaptive_engines(FLAT, "jetspec", ahead=ahead)
        with verified_steps(made) as steps:
            made.compare(PROMPTS[:4], MIXED)
        nodes = {tuple(nodes for _, nodes in step.values()) for step in steps}
        assert len(nodes) > 2, steps


def check_a_heads_random_drafts_are_given_up() -> None:
    """And with them the rows that a scheduler reserves ahead."""
    made = adaptive_engines(((1.0, 500.0), (30.0, 2000.0)), "jetspec", ngram_topk=0)
    params = greedy(max_tokens=60, ignore_eos=True)
    expected = generate(made.plain, PROMPTS[:4], params)
    for _ in range(2):
        with verified_steps(made) as steps:
            actual = generate(made.tree, PROMPTS[:4], params)
        for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
            assert_same_output(a, b, f"request {i}")
    rows = [sum(rows for rows, _ in step.values()) for step in steps if len(step) == 4]
    assert len(rows) > 40 and sum(rows[5:]) < 4.5 * len(rows), rows


def check_requests_that_fix_their_budget_among_adaptive_ones() -> None:
    for ahead in (False, True):
        made = adaptive_engines(STEEP, ahead=ahead)
        params = [
            greedy(max_tokens=20, extra_args={"specplug_tree_budget": budget})
            for budget in (0, 2, 5, "auto")
        ]
        with verified_steps(made) as steps:
            made.compare(PROMPTS[:4], params)
        full = [step for step in steps if len(step) == 4][3:]
        most = {name: max(step[name][1] for step in full) for name in full[0]}
        assert sorted(most.values())[0] == 0 and {2, 5} <= set(most.values()), full


def check_step_costs_are_measured_and_learnt() -> None:
    for ahead in (False, True):
        made = engines(ahead=ahead, budget="auto")
        planner = made.runner.planner
        start_budget(planner, made.runner.state)
        with calls(planner.adaptive.costs, "observe_verify") as seen:
            generate(made.tree, PROMPTS[:4], greedy(max_tokens=12, ignore_eos=True))
        # Steps of only decoding rows: rows, logits, tokens that roots attended, milliseconds, and
        # tokens that nodes attended.
        assert len(seen) >= 3
        for rows, sampled, context, milliseconds, more_context in seen:
            assert 1 <= rows == sampled <= 28 and 0 < milliseconds < 1e4
            assert context > 0 and context + more_context > rows * 4


def check_rows_that_run_out() -> None:
    """Eight requests leave a request two nodes, then one, then the requests that are left more."""
    made = pair(
        "oracle",
        speculative={"num_speculative_tokens": 6, "tree_budget": 6, "max_step_rows": 20},
        tree={"async_scheduling": True},
        **CACHE,
    )
    made.compare(PROMPTS * 2, [greedy(max_tokens=6 + 4 * i) for i in range(8)])


def check_the_end_of_the_context() -> None:
    longest = 256
    prompts = [[8], list(range(6, 6 + longest - 1)), list(range(6, 6 + longest - 20))]
    made = engines(max_num_batched_tokens=100)
    outputs, _ = made.compare(prompts, [greedy(max_tokens=30), greedy(max_tokens=300),
                                        greedy(max_tokens=300)])  # fmt: skip
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 3


def check_aborted_requests() -> None:
    made = engines()
    expected, _ = made.compare(PROMPTS[:4], greedy(max_tokens=16))
    answers = [list(o.outputs[0].token_ids) for o in expected]
    engine = made.tree.llm_engine
    for abort_at in (1, 2, 4):
        for i, prompt in enumerate(PROMPTS[:4]):
            name = f"a{abort_at}-{i}"
            engine.add_request(name, {"prompt_token_ids": prompt}, greedy(max_tokens=16))
        finished, step = {}, 0
        while engine.has_unfinished_requests():
            if step == abort_at:
                engine.abort_request([f"a{abort_at}-1", f"a{abort_at}-2"])
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            step += 1
        assert finished[f"a{abort_at}-0"] == answers[0]
        assert finished[f"a{abort_at}-3"] == answers[3]
    assert len(made.runner.speculator.extra_args) <= 8


def _diverges(made: Pair) -> None:
    def compare() -> None:
        for _ in range(3):
            made.compare(PROMPTS[:4], greedy(max_tokens=40))

    with pytest.raises(AssertionError, match="differs"):
        compare()


def check_it_would_notice_missing_compaction() -> None:
    made = engines(ahead=False)
    backend = made.runner.tree_backend
    backend.compact = lambda *args: None
    try:
        _diverges(made)
    finally:
        del backend.compact


def check_it_would_notice_linear_positions() -> None:
    import vllm_specplug.vllm_v2.runner as runner

    stock = runner.set_positions
    runner.set_positions = lambda *args: None
    try:
        _diverges(engines())
    finally:
        runner.set_positions = stock


def check_it_would_notice_a_causal_mask() -> None:
    import vllm_specplug.vllm_v2.backend as backend

    stock = backend.ancestor_words

    def causal(trees: Any) -> torch.Tensor:
        places = trees.rows.places
        return (torch.ones_like(places) << (places + 1))[:, None] - 1

    backend.ancestor_words = causal
    try:
        _diverges(engines())
    finally:
        backend.ancestor_words = stock


def check_adapters_of_requests() -> None:
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    for ahead in (False, True):
        made = engines(ahead=ahead, both=LORA)
        compare_adapters(made, PROMPTS)
    assert_costs_are_measured_with_adapters(made)
    for name in ("index_mapping", "prompt_mapping"):
        with mapped(made, **{name: of_the_next_row}):
            adapter_checks.diverges(made, PROMPTS)
    # As vLLM maps them: one row with logits per request. The engine does not survive it.
    made.runner._set_active_loras = partial(LoRAModelRunnerMixin._set_active_loras, made.runner)
    with pytest.raises(RuntimeError):
        generate(made.tree, PROMPTS, greedy(), list(adapters()))
