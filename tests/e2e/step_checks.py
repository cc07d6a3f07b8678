# SPDX-License-Identifier: Apache-2.0
"""Steps of every method against plain decoding, with the scheduler waiting for each of them and
ahead of it; see test_steps.py.

Without a Triton for CPUs, both engines take the kernels that stand in for vLLM's, which have tests
of their own. With SPECPLUG_INTERPRETED=1, to be set before vLLM is imported, both take vLLM's,
in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

if os.environ.get("SPECPLUG_INTERPRETED") == "1":
    from tests.e2e import interpreter

    interpreter.install()

import pytest
import torch

from tests.e2e.event_checks import LONG
from tests.e2e.option_checks import PROMPTS, greedy, seeded
from tests.e2e.pair import (
    Counts,
    Pair,
    generate,
    head_options,
    scheduled,
    watch_preemptions,
    watch_prefix_hits,
)

MIXED = [greedy(max_tokens=24), *(seeded(i, max_tokens=24) for i in range(3))]


def engines(
    method: str = "oracle", *, ahead: bool = True, model: str | None = None, **tree: Any
) -> Pair:
    """A pair with six nodes per tree at most. `model` takes the place of the method's own head,
    `tree` has engine arguments of the tree engine alone."""
    options = {"num_speculative_tokens": 6, "tree_budget": 6, "ngram_topk": 3}
    options |= {} if model is None else {"model": model}
    made = scheduled(ahead, method, speculative=options, tree=tree)
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
    preempted = watch_preemptions(made.tree)
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
    """Over a partial cache of 20 tokens, smaller than the contexts, selected again after 18."""
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
    preempted = watch_preemptions(made.tree)
    made.compare(LONG[:3], greedy(max_tokens=70))
    assert preempted


def check_heads_that_read_the_next_token() -> None:
    for ahead in (False, True):
        _compare("eagle3_tree", ahead)


def check_a_prefix_hit_that_leaves_one_token() -> None:
    """vLLM would pad such a request with drafts that nobody proposed."""
    made = engines(enable_prefix_caching=True)
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


def check_rows_that_run_out() -> None:
    """Eight requests leave a request two nodes, then one, then the requests that are left more."""
    options = {"num_speculative_tokens": 6, "tree_budget": 6, "max_step_rows": 20}
    made = scheduled(True, speculative=options)
    made.compare(PROMPTS * 2, [greedy(max_tokens=6 + 4 * i) for i in range(8)])


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
        offsets = trees.rows.offsets
        return (torch.ones_like(offsets) << (offsets + 1))[:, None] - 1

    backend.ancestor_words = causal
    try:
        _diverges(engines())
    finally:
        backend.ancestor_words = stock
