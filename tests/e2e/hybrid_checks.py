# SPDX-License-Identifier: Apache-2.0
"""Trees on targets with recurrent states against plain decoding, float32; see test_hybrids.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.hybrids import make_hybrid_target, use_float32_states
from tests.e2e.option_checks import greedy, seeded
from tests.e2e.pair import Counts, Pair, core_of, pair, watch_preemptions
from tests.e2e.target_checks import WINDOW_PROMPTS

use_float32_states()

VOCAB = 300
# Prompts come in chunks, and there are fewer rows than all trees want.
CHUNKS = {"max_num_batched_tokens": 64}
ENGINE: dict[str, Any] = {"skip_tokenizer_init": True, **CHUNKS}
SPECULATIVE = {"num_speculative_tokens": 8, "tree_budget": 8}


@cache
def target(family: str = "Qwen3Next", **config: Any) -> str:
    folder = Path(tempfile.mkdtemp(prefix="specplug-hybrid-")) / family
    return str(make_hybrid_target(folder, family, VOCAB, **config))


def engines(method: str = "oracle", **options: Any) -> Pair:
    speculative = {**SPECULATIVE, **options.pop("speculative", {})}
    return pair(method, **{"model": target(), **ENGINE, **options}, speculative=speculative)


def compared(made: Pair, **options: Any) -> Counts:
    """Greedy and seeded, drafted for and not, ending at different steps."""
    params = [
        make(max_tokens=24 + 3 * i, detokenize=False)
        for i, make in enumerate([greedy, lambda **kw: seeded(1, **kw)] * 4)
    ]
    params[3].extra_args = {"specplug_tree_budget": 0}
    return made.compare(WINDOW_PROMPTS, params, **options)[1]


@contextmanager
def changed(name: str, change: Callable[..., Any]) -> Iterator[None]:
    """`StateStep` with `change(stock, step, *args)` in the place of a method."""
    from vllm_specplug.vllm_attention.state_rows import StateStep

    stock = getattr(StateStep, name)
    setattr(StateStep, name, lambda step, *args: change(stock, step, *args))
    try:
        yield
    finally:
        setattr(StateStep, name, stock)


def _is_a_line(stock: Any, step: Any, requests: Any, parents: torch.Tensor) -> None:
    stock(step, requests, torch.where(parents < 0, -1, torch.arange(len(parents)) - 1))


def _by_place(stock: Any, step: Any, last_rows: torch.Tensor, *rest: Any) -> None:
    """As many rows as were accepted, but the first ones."""
    places = []
    for start, row in zip(step.starts.tolist(), last_rows.tolist(), strict=False):
        depth = 0
        while step.parents[row] >= 0:
            row, depth = int(step.parents[row]), depth + 1
        places.append(start + depth)
    stock(step, torch.tensor(places), *rest)


# What trees and commits must not be; either shows in the output.
WRONG: list[tuple[str, Callable[..., Any]]] = [("__init__", _is_a_line), ("commit", _by_place)]


def check_greedy_and_seeded() -> None:
    counts = compared(engines(), least_accepted=60)
    assert counts.skipping > 20, counts


def check_wrong_parents_and_wrong_commits_show() -> None:
    made = engines()
    for name, change in WRONG:
        with changed(name, change), pytest.raises(AssertionError, match="differs"):
            compared(made)
    # Nothing of it is left behind.
    compared(made, least_accepted=60)


def check_one_state_per_sequence() -> None:
    """Caches are laid out as without speculation: same pages, and one block per state."""
    from vllm.v1.kv_cache_interface import MambaSpec

    made = engines()
    plain, tree = (core_of(llm).scheduler for llm in (made.plain, made.tree))
    groups = [s.kv_cache_config.kv_cache_groups for s in (plain, tree)]
    shapes = [[(g.kv_cache_spec, len(g.layer_names)) for g in each] for each in groups]
    assert shapes[0] == shapes[1]
    states = [i for i, g in enumerate(groups[1]) if isinstance(g.kv_cache_spec, MambaSpec)]
    assert len(states) == 3
    assert all(groups[1][i].kv_cache_spec.num_speculative_blocks == 0 for i in states)
    managers = tree.kv_cache_manager.coordinator.single_type_managers
    held: set[int] = set()
    schedule = tree.schedule

    def noted(*args: Any) -> Any:
        output = schedule(*args)
        for i in states:
            held.update(len(blocks) for blocks in managers[i].req_to_blocks.values())
        return output

    tree.schedule = noted
    try:
        compared(made, least_accepted=60)
    finally:
        tree.schedule = schedule
    assert held == {1}
    assert made.runner.state.state_layers.row_bytes > 0


def check_preemption() -> None:
    """A request that lost its state is computed again from its first token."""
    made = engines(num_gpu_blocks_override=24)
    preempted = watch_preemptions(made.tree)
    made.compare(WINDOW_PROMPTS[1:], greedy(max_tokens=90, detokenize=False))
    assert preempted
