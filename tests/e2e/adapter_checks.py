# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the target on trees against plain decoding; see test_adapters.py."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.event_checks import LONG
from tests.e2e.option_checks import PROMPTS, greedy, seeded
from tests.e2e.pair import (
    Pair,
    both_schedulers,
    core_of,
    generate,
    pair,
    sequences_of,
    target,
    watch_prefix_hits,
)
from tests.e2e.tiny import make_adapter
from vllm_specplug.metrics import StepStats
from vllm_specplug.vllm_v2.step_input import verified_step

# What each changes: layers alone, the embedding too, and the LM head too.
MODULES = {
    "layers": ("q_proj", "v_proj", "down_proj"),
    "embedding": ("embed_tokens", "k_proj", "o_proj", "gate_proj"),
    "lm_head": ("lm_head", "up_proj"),
}
# A slot stays empty: on a CPU vLLM reads the last one for rows without an adapter.
LORA = {"enable_lora": True, "max_loras": len(MODULES) + 1, "max_lora_rank": 8}
CACHED = {"tree": {"enable_prefix_caching": True}}


@cache
def adapters() -> tuple[Any, ...]:
    """The bare target, and one request per adapter."""
    from vllm.lora.request import LoRARequest

    folder = Path(tempfile.mkdtemp(prefix="specplug-adapters-"))
    return None, *(
        LoRARequest(name, i, str(make_adapter(folder / name, target(), modules, seed=i)))
        for i, (name, modules) in enumerate(MODULES.items(), 1)
    )


def by_adapter(made: Pair) -> tuple[Counter[int], Counter[int]]:
    """Nodes and accepted drafts by LoRA id; grow as the pair runs."""
    runner, nodes, accepted = made.runner, Counter[int](), Counter[int]()
    record = runner.speculator.learn

    def recorded(*args: Any) -> Any:
        ids = runner.lora_state.lora_ids[args[0].idx_mapping_np]
        requests = verified_step(args[0], runner.speculator.trees, args[1]).requests
        for i, request in enumerate(requests):
            nodes[int(ids[i])] += 0 if request.tree is None else request.tree.num_nodes
            accepted[int(ids[i])] += len(request.accepted_path)
        return record(*args)

    runner.speculator.learn = recorded
    return nodes, accepted


@contextmanager
def counted_by_metrics(made: Pair) -> Iterator[StepStats]:
    """What the payloads of the steps add up to."""
    metrics, stats = made.runner.tree_metrics, StepStats()
    stock = metrics.end_step

    def end_step() -> Any:
        payload = stock()
        stats.merge(payload)
        return payload

    metrics.end_step = end_step
    try:
        yield stats
    finally:
        del metrics.end_step


def batch(prompts: list[list[int]], each: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Each prompt with each of these adapters; every other prompt's answers are sampled."""
    return {
        "prompts": [prompt for prompt in prompts for _ in each],
        "params": [
            seeded(p, **options) if p % 2 else greedy(**options)
            for p in range(len(prompts))
            for _ in each
        ],
        "adapters": list(each) * len(prompts),
    }


def compare_adapters(made: Pair, prompts: list[list[int]], **options: Any) -> list[Any]:
    """The pair's answers; raises unless each adapter has answers of its own, and drafts that were
    accepted."""
    nodes, accepted = by_adapter(made)
    each = adapters()
    with counted_by_metrics(made) as stats:
        expected, _ = made.compare(**batch(prompts, each, **options))
    assert set(stats.by_adapter) == {"", *MODULES}, stats
    for i, adapter in enumerate(each):
        _, *counts = stats.by_adapter["" if adapter is None else adapter.lora_name]
        assert counts == [nodes[i], accepted[i]], (adapter, counts, nodes, accepted)
    for i in range(0, len(expected), len(each)):
        answers = {tuple(o.outputs[0].token_ids) for o in expected[i : i + len(each)]}
        assert len(answers) == len(each), "an adapter changes nothing"
    assert set(accepted) == set(range(len(each))), accepted
    assert min(accepted.values()) > 20 and min(nodes.values()) > 60, (nodes, accepted)
    return expected


@contextmanager
def mapped(made: Pair, **change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Iterator[None]:
    """LoRA ids by row are changed before vLLM takes them: `index_mapping`, of the rows of a
    forward, and `prompt_mapping`, of its rows with logits."""
    manager = made.runner.lora_manager
    stock = manager.set_active_adapters

    def set_active_adapters(requests: Any, mapping: Any) -> None:
        values = {name: by(getattr(mapping, name)) for name, by in change.items()}
        stock(requests, replace(mapping, **values))

    manager.set_active_adapters = set_active_adapters
    try:
        yield
    finally:
        del manager.set_active_adapters


def of_the_next_row(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The last row of each request, a node of its tree, belongs to the request behind it."""
    return *ids[1:], ids[-1]


def diverges(made: Pair, prompts: list[list[int]]) -> None:
    with pytest.raises(AssertionError, match="differs"):
        made.compare(**batch(prompts, adapters()))


def check_adapters_of_requests() -> None:
    """Three adapters and the bare target in one batch, greedy and sampled."""
    for made in both_schedulers(**LORA, **CACHED):
        compare_adapters(made, PROMPTS)


def check_rows_of_another_adapter_show() -> None:
    for made in both_schedulers(**LORA, **CACHED):
        for name in ("index_mapping", "prompt_mapping"):
            with mapped(made, **{name: of_the_next_row}):
                diverges(made, PROMPTS)
        made.compare(**batch(PROMPTS, adapters()))


def check_prefix_hits_are_of_the_same_adapter() -> None:
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
    stock = kv_cache_utils._gen_lora_extra_hash_keys
    kv_cache_utils._gen_lora_extra_hash_keys = lambda request: []
    try:
        assert manager.reset_prefix_cache()
        diverges(made, LONG[:2])
    finally:
        kv_cache_utils._gen_lora_extra_hash_keys = stock
        assert manager.reset_prefix_cache()


def check_more_adapters_than_slots_preempted_and_in_chunks() -> None:
    """Slots change hands between steps, blocks between requests, and prompts come in pieces."""
    made = pair(
        "oracle",
        **{**LORA, "max_loras": 2},
        tree={"num_gpu_blocks_override": 12, "max_num_batched_tokens": 144},
    )
    scheduler = core_of(made.tree).scheduler
    preempted, original = [], scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.lora_request.lora_name)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = noted
    # A request without an adapter would read the last slot: see LORA.
    made.compare(**batch(LONG[:4], adapters()[1:], max_tokens=90))
    assert len({*preempted}) > 1, preempted


def check_one_row_with_logits_per_request_is_not_enough() -> None:
    """As vLLM maps adapters. The engine does not survive it."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    made = pair("oracle", **LORA)
    made.compare(**batch(PROMPTS, adapters()))
    made.runner._set_active_loras = partial(LoRAModelRunnerMixin._set_active_loras, made.runner)
    with pytest.raises(RuntimeError):
        generate(made.tree, PROMPTS, greedy(), list(adapters()))


def assert_costs_are_measured_with_adapters(made: Pair) -> None:
    """The same ones in every forward of a calibration, made once, and none after it."""
    from vllm_specplug.vllm_worker.cost import calibration

    state, manager = made.runner.state, made.runner.lora_manager
    # As at start: dummies have the numbers of real ones.
    manager.remove_all_adapters()
    seen, added = [], []
    forward, add = state.dummy_forward, manager.add_dummy_lora

    def noted(rows: int, context: int) -> Any:
        hidden = forward(rows, context)
        seen.append(len(manager.list_adapters()))
        return hidden

    def counted(*args: Any, **kwargs: Any) -> Any:
        # False where it is there already.
        is_new = add(*args, **kwargs)
        added.extend([args] if is_new else [])
        return is_new

    state.dummy_forward, manager.add_dummy_lora = noted, counted
    try:
        with state.dummy_adapters():
            calibration.Calibrator(state, list, time_limit_s=0.1).measure()
    finally:
        state.dummy_forward, manager.add_dummy_lora = forward, add
    assert seen and set(seen) == {LORA["max_loras"]} and len(added) == LORA["max_loras"]
    assert manager.list_adapters() == set()
