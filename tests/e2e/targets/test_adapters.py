# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the target on trees against plain decoding, and every method beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.adapters import (
    CACHED,
    LORA,
    adapters,
    batch,
    by_adapter,
)
from tests.e2e.pair import (
    METHODS,
    Pair,
    both_schedulers,
    changed,
    core_of,
    generate,
    pair,
    sequences_of,
    watch_drafts,
    watch_prefix_hits,
)
from tests.e2e.requests import LONG, PROMPTS, greedy
from vllm_specplug.vllm_worker.runner_view import RunnerView

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

# assistant_tree and mtp_tree draft for targets of their own, and the adapters are for another one.
OTHERS = sorted({*METHODS} - {"oracle", "jetspec", "tokenswift", "assistant_tree", "mtp_tree"})


def compare_adapters(made: Pair, prompts: list[list[int]], **options: Any) -> list[Any]:
    """The pair's answers; raises unless each adapter has answers of its own, and drafts that were
    accepted."""
    nodes, accepted = by_adapter(made)
    each = adapters()
    expected, _ = made.compare(**batch(prompts, each, **options))
    for i in range(0, len(expected), len(each)):
        answers = {tuple(o.outputs[0].token_ids) for o in expected[i : i + len(each)]}
        assert len(answers) == len(each), "an adapter changes nothing"
    assert set(accepted) == set(range(len(each))), accepted
    assert min(accepted.values()) > 20 and min(nodes.values()) > 60, (nodes, accepted)
    return expected


def mapped(made: Pair, **change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """LoRA ids by row are changed before vLLM takes them: `index_mapping`, of the rows of a
    forward, and `prompt_mapping`, of its rows with logits."""

    def set_active_adapters(stock: Any, requests: Any, mapping: Any) -> None:
        values = {name: by(getattr(mapping, name)) for name, by in change.items()}
        stock(requests, replace(mapping, **values))

    return changed(made.runner.lora_manager, "set_active_adapters", set_active_adapters)


def of_the_next_row(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The last row of each request, a node of its tree, belongs to the request behind it."""
    return *ids[1:], ids[-1]


def diverges(made: Pair, prompts: list[list[int]]) -> None:
    with pytest.raises(AssertionError, match="differs"):
        made.compare(**batch(prompts, adapters()))


def test_adapters_of_requests() -> None:
    """Three adapters and the bare target in one batch, greedy and sampled."""
    for made in both_schedulers(**LORA, **CACHED):
        compare_adapters(made, PROMPTS)


def test_rows_of_another_adapter_show() -> None:
    for made in both_schedulers(**LORA, **CACHED):
        for name in ("index_mapping", "prompt_mapping"):
            with mapped(made, **{name: of_the_next_row}):
                diverges(made, PROMPTS)
        made.compare(**batch(PROMPTS, adapters()))


def test_prefix_hits_are_of_the_same_adapter() -> None:
    from vllm.v1.core import kv_cache_utils

    made = pair("oracle", **LORA, **CACHED)
    expected, _ = made.compare(**batch(LONG[:2], adapters()))
    hits = watch_prefix_hits(made.tree)
    again = batch(sequences_of(expected), (None,))
    again["adapters"] = [*adapters()] * 2
    made.compare(**again)
    assert len(hits) == len(expected) and min(hits.values()) >= 64, hits
    # Generated text, too, whose blocks compaction wrote.
    assert max(hits.values()) >= 96, hits
    # Blocks that forget whose keys they hold.
    manager = core_of(made.tree).scheduler.kv_cache_manager
    assert manager.reset_prefix_cache()
    with patch.object(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda request: []):
        diverges(made, LONG[:2])
    assert manager.reset_prefix_cache()


def test_more_adapters_than_slots_preempted_and_in_chunks() -> None:
    """Slots change hands between steps, blocks between requests, and prompts come in pieces."""
    made = pair(
        "oracle",
        **{**LORA, "max_loras": 2},
        tree={"num_gpu_blocks_override": 12, "max_num_batched_tokens": 144},
    )
    scheduler = core_of(made.tree).scheduler
    preempted: list[str] = []

    def noted(stock: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.lora_request.lora_name)
        return stock(request, *args, **kwargs)

    # A request without an adapter would read the last slot: see LORA.
    with changed(scheduler, "_preempt_request", noted):
        made.compare(**batch(LONG[:4], adapters()[1:], max_tokens=90))
    assert len({*preempted}) > 1, preempted


def test_adapters_are_added_and_removed() -> None:
    made = pair("oracle", **LORA)
    for adapter in adapters()[1:]:
        engines = [llm.llm_engine for llm in (made.plain, made.tree)]
        assert all(engine.add_lora(adapter) for engine in engines)
        made.compare(**batch(PROMPTS, (None, adapter)))
        assert all(engine.remove_lora(adapter.lora_int_id) for engine in engines)
        assert not any(adapter.lora_int_id in engine.list_loras() for engine in engines)
    # Loaded again by a request that names it.
    made.compare(**batch(PROMPTS, (adapter,)))


@pytest.mark.full
def test_a_heads_context_is_of_the_same_adapter() -> None:
    """Drafts from keys and values found in the prefix cache are those from computed ones."""
    # Branches of n-grams are scored by what was right before.
    made = pair("jetspec", **LORA, **CACHED, speculative={"ngram_topk": 0})
    made.compare(**batch(PROMPTS, adapters()), least_accepted=0)
    manager, found = core_of(made.tree).scheduler.kv_cache_manager, []
    for prompt in LONG[:2]:
        for adapter in adapters():
            assert manager.reset_prefix_cache()
            cold = _drafts(made, prompt, adapter)
            assert manager.reset_prefix_cache()
            for other in adapters():
                _drafts(made, prompt, other)
            assert _drafts(made, prompt, adapter) == cold
            found.append(cold)
    trees = {str(list(drafts.values())) for drafts in found}
    assert len(trees) == len(found), "the adapters do not matter"


def _drafts(made: Pair, prompt: list[int], adapter: Any) -> dict[Any, Any]:
    """Tokens and parents of the trees of one request."""
    with watch_drafts(made.tree) as seen:
        generate(made.tree, [prompt], greedy(max_tokens=24), [adapter])
    return {known: drafted[:2] for known, drafted in seen.items()}


@pytest.mark.full
def test_drafts_of_the_targets_own_layers() -> None:
    """Nothing of the context is left out, and one token drafted: it is the target's next one,
    save that drafts come from the base LM head."""
    options = {"kv_budget": 200, "ngram_topk": 0, "tree_depth": 1, "tree_width": 1}
    made = pair("tokenswift", **LORA, speculative=options)
    run = batch(PROMPTS, adapters()[:3], max_tokens=48)
    run["params"] = greedy(max_tokens=48)
    nodes, accepted = by_adapter(made)
    made.compare(**run, branching=False)
    assert accepted == nodes and min(nodes.values()) > 80, (nodes, accepted)
    # The target drafts for itself without adapters.
    with patch.object(made.runner.state, "adapters", lambda rows: ([0] * len(rows), set())):
        made.compare(**run, branching=False)
    assert all(accepted[i] < 0.9 * nodes[i] for i in (1, 2)), (nodes, accepted)


@pytest.mark.full
def test_step_costs_are_measured_with_adapters_that_do_not_stay() -> None:
    """Dummy adapters of the calibration have the ids of real ones."""
    seen: list[int] = []

    def noted(stock: Any, view: Any, *args: Any) -> Any:
        hidden = stock(view, *args)
        seen.append(len(view.runner.lora_manager.list_adapters()))
        return hidden

    for method in ("ngram_tree", "tokenswift"):
        with changed(RunnerView, "dummy_forward", noted):
            made = pair(method, **LORA, speculative={"tree_budget": "auto"})
        assert seen and set(seen) == {LORA["max_loras"]}
        assert made.runner.planner.adaptive is not None
        assert made.runner.lora_manager.list_adapters() == set()
        made.compare(**batch(PROMPTS, adapters()), least_accepted=0)


@pytest.mark.full
@pytest.mark.parametrize("method", OTHERS)
def test_other_methods(method: str) -> None:
    made = pair(method, **LORA)
    made.compare(**batch([*PROMPTS, LONG[0]], adapters()), least_accepted=0)
