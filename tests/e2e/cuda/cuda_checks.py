# SPDX-License-Identifier: Apache-2.0
"""Trees as on CUDA, against plain vLLM, in Triton's interpreter; see test_cuda.py. On a GPU,
see cuda_on_gpu.py.

To be run with SPECPLUG_INTERPRETED=1 or SPECPLUG_CHECKS_ON_GPU=1, set before vLLM is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

# Before vLLM: it puts Triton's interpreter in place.
from tests.e2e.cuda import cuda_device  # isort: skip

import pytest
import torch

from tests.e2e import number_formats
from tests.e2e.budgets import FLAT, freeze_costs
from tests.e2e.families import engine_of
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Counts, Pair, core_of, pair
from tests.e2e.requests import greedy, seeded
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.ngram_tree.drafter import NgramTreeDrafter
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows
from vllm_specplug.vllm_v2 import cuda_trees, host_step, worker_gpu
from vllm_specplug.vllm_v2.host_step import HostCopy

cuda_device.use_worker()
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
# One is longer than a step, so that its pieces come beside requests that decode.
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], list(range(20, 60)), [9, 9, 9]]


def engines(
    method: str = "oracle",
    *,
    ahead: bool,
    ngram_topk: int = 3,
    nodes: int = 6,
    budget: int | str | None = None,
    target: dict[str, Any] | None = None,
    head: dict[str, str] | None = None,
    **tree: Any,
) -> Pair:
    options = {
        "num_speculative_tokens": nodes,
        "tree_budget": nodes if budget is None else budget,
        "ngram_topk": ngram_topk,
        **cuda_device.tree_options(),
        **(head or {}),
    }
    made = pair(
        method,
        speculative=options,
        tree={"async_scheduling": ahead, **cuda_device.tree_arguments(), **tree},
        max_num_batched_tokens=32,
        max_num_seqs=4,
        **cuda_device.engine_arguments(),
        **(target or {}),
    )
    core = core_of(made.tree)
    assert type(core.scheduler).__name__ == ("AsyncScheduler" if ahead else "Scheduler")
    assert isinstance(made.runner, cuda_device.runner_class())
    assert cuda_device.KERNEL in ("auto", made.runner.tree_backend.kernel.name)
    return made


def compare(made: Pair, ahead: bool) -> Counts:
    params = [
        greedy(max_tokens=10, logprobs=2),
        seeded(1, max_tokens=12),
        seeded(2, max_tokens=8, logprobs=2),
    ]
    _, counts = made.compare(PROMPTS, params)
    assert (counts.stale > 0) == ahead, counts
    return counts


@contextmanager
def profiles() -> Iterator[list[int]]:
    """Engines built here are profiled before their caches are made, as on CUDA; yields what each
    profile counts of a drafter's own memory, in bytes."""
    counted: list[int] = []
    memory = worker_gpu.drafter_memory

    def drafter_memory(state: Any) -> torch.Tensor:
        made = memory(state)
        counted.append(made.nbytes)
        return made

    with patch.object(worker_gpu, "drafter_memory", drafter_memory), cuda_device.profiled():
        yield counted


# A head with n-gram branches, and these alone.
BOTH = ("jetspec", "ngram_tree")

# Around gpt-oss' window, and longer than a block.
WINDOW_PROMPTS = [[(5 * i + n) % 250 + 5 for i in range(n)] for n in (13, 24, 40)]


def compare_windows(made: Pair) -> Counts:
    params = [
        greedy(max_tokens=20, detokenize=False),
        *(seeded(i, max_tokens=20, detokenize=False) for i in (1, 2)),
    ]
    return made.compare(WINDOW_PROMPTS, params)[1]


def _changing(**changes: Any) -> Any:
    """Tree rows whose layers have other features than they have."""
    original = DeviceTreeRows.attend

    def attend(self: Any, query: Any, cache: Any, output: Any, scale: float, features: Any,
               block_table: Any) -> None:  # fmt: skip
        if "block_table" in changes:
            block_table = self.metadata.block_table
        given = {name: value for name, value in changes.items() if name != "block_table"}
        original(self, query, cache, output, scale, replace(features, **given), block_table)

    return patch.object(DeviceTreeRows, "attend", attend)


# vLLM makes a process's groups of ranks with its first engine: one with experts comes first.
def check_windows_and_sinks_in_groups() -> None:
    """gpt-oss: windows of 16 and full attention in KV cache groups of their own, and sinks."""
    cuda_device.need_experts()
    made = engines(ahead=True, target=engine_of("GptOss"))
    assert len(made.runner.kv_cache_config.kv_cache_groups) == 2
    backend = made.runner.tree_backend
    assert [index for index, _ in backend.groups] == [0, 1]
    counts = compare_windows(made)
    assert counts.skipping > 1 and counts.stale > 0, counts
    stock = backend.compact

    def by_the_first_table(*args: Any) -> None:
        tables = backend.block_tables
        backend.block_tables = [tables[0], tables[0]]
        stock(*args)
        backend.block_tables = tables

    controls = {
        "windows": _changing(window=0),
        "sinks": _changing(sinks=None),
        "block tables": _changing(block_table=None),
        "compaction": patch.object(backend, "compact", by_the_first_table),
    }
    assert not [name for name, control in controls.items() if is_equal(made, control)]


def is_equal(made: Pair, control: Any) -> bool:
    with control:
        try:
            compare_windows(made)
        except AssertionError as error:
            return "differs" not in str(error)
        return True


def check_branching_trees() -> None:
    assert compare(engines(ahead=False), False).skipping > 1


def check_branching_trees_scheduled_ahead() -> None:
    assert compare(engines(ahead=True), True).skipping > 1


def check_trees_without_their_mask_diverge() -> None:
    """The control: every row attends the rows before it, as in a chain."""
    made = engines(ahead=True)
    with patch.object(cuda_trees, "parent_rows", _chain), pytest.raises(AssertionError):
        compare(made, True)


def _chain(trees: Any) -> torch.Tensor:
    return (trees.rows.offsets - 1).to(torch.int32)


def check_uncompacted_paths_diverge() -> None:
    made = engines(ahead=True)
    backend = made.runner.tree_backend
    with patch.object(backend, "compact", lambda *args: None), pytest.raises(AssertionError):
        compare(made, True)


def check_adaptive_budget_of_events() -> None:
    """Costs by marks that the device passes later."""
    made = engines(ahead=True, budget="auto", nodes=7)
    adaptive = made.runner.planner.adaptive
    compare(made, True)
    assert adaptive.costs.draft is not None


def known_tokens(requests: DeviceRequests) -> list[list[list[int]]]:
    """What follows each anchor in the oracle's sequences."""
    found = []
    for anchor, context in zip(
        requests.anchors.tolist(), requests.context_lens.tolist(), strict=True
    ):
        sequences = OracleDrafter.sequences
        found.append(
            [s[context + 1 :] for s in sequences if len(s) > context and s[context] == anchor]
        )
    return found


@contextmanager
def knowing_candidates() -> Iterator[list[int]]:
    """A block head's forward is run, and its candidates are the tokens that follow in any of the
    oracle's sequences; yields how many requests of each draft had their tokens on the host."""
    original, seen = BlockHeadDrafter.draft_candidates, []

    def candidates(self: Any, requests: Any, depth: int, width: int) -> Any:
        ids, log_probs, hidden = original(self, requests, depth, width)
        seen.append(0 if isinstance(requests, DeviceRequests) else len(requests))
        anchors = [int(anchor) for anchor in requests.anchors]
        for r, (anchor, context) in enumerate(zip(anchors, requests.context_lens, strict=True)):
            if not requests.budgets[r]:
                # Its rows are not computed.
                continue
            at = int(context)
            known = [s for s in OracleDrafter.sequences if len(s) > at and s[at] == anchor]
            for d in range(depth):
                told = [s[at + 1 + d] for s in known if len(s) > at + 1 + d]
                tokens = list(dict.fromkeys([*told, *ids[r, d].tolist()]))[:width]
                # The answer is the best of them and the second best in turns.
                ids[r, d] = torch.tensor(tokens if d % 2 else [tokens[1], tokens[0], *tokens[2:]])
        # The third falls far behind: a local head is to choose among the first two.
        falling = torch.arange(1, ids.shape[2] + 1, device=ids.device).mul(-0.4)
        falling[2:] -= 6.0
        return ids, falling.expand(log_probs.shape).contiguous(), hidden

    with patch.object(BlockHeadDrafter, "draft_candidates", candidates):
        yield seen


def compare_block_head(
    method: str, ahead: bool, ngram_topk: int, head: dict[str, str] | None = None
) -> list[int]:
    with knowing_candidates() as seen:
        made = engines(method, ahead=ahead, ngram_topk=ngram_topk, nodes=10, head=head)
        seen.clear()
        assert compare(made, ahead).skipping > 1
    return seen


def check_causal_block_head_on_the_device() -> None:
    for ahead in (False, True):
        assert set(compare_block_head("jetspec", ahead, 0)) == {0}


def check_bidirectional_block_head_on_the_device() -> None:
    assert set(compare_block_head("ddtree", True, 0)) == {0}


def check_block_head_and_ngrams() -> None:
    assert set(compare_block_head("jetspec", True, 3)) == {0}


class LateCopy(HostCopy):
    """A copy that comes when five more were asked for, two steps later, as from a device that the
    host runs ahead of."""

    made = 0
    waits = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.clone())
        LateCopy.made += 1
        self.number = LateCopy.made
        self.was_waited_for = False

    @property
    def has_come(self) -> bool:
        return self.was_waited_for or LateCopy.made - self.number >= 5

    def read(self) -> torch.Tensor:
        if not self.has_come:
            LateCopy.waits += 1
            self.was_waited_for = True
        return super().read()


@contextmanager
def late_copies() -> Iterator[None]:
    """Whoever reads what has not come waits, and is counted."""
    with patch.object(host_step, "HostCopy", LateCopy):
        yield


def _compare_defaults(
    method: str, ahead: bool = True, budget: int | str = "auto"
) -> tuple[Counts, int]:
    """The comparison, and how often the host waited for the device in it."""
    # Long enough for lookups to find what a small target repeats.
    params = [greedy(max_tokens=24, logprobs=2), seeded(1, max_tokens=24), greedy(max_tokens=20)]
    with knowing_candidates(), late_copies():
        made = engines(method, ahead=ahead, nodes=10, budget=budget)
        speculator = made.runner.speculator
        if budget == "auto":
            # An interpreter's own would leave no room for drafts.
            freeze_costs(made, FLAT)
        LateCopy.waits = 0
        branching = method != "ngram_tree"
        _, counts = made.compare(PROMPTS, params, least_accepted=6, branching=branching)
        waits = LateCopy.waits
    assert (counts.stale > 0) == ahead, counts
    if ahead and budget == "auto":
        assert made.runner.planner.adaptive is not None and speculator.reserved is not None
    return counts, waits


def check_defaults_of_a_causal_block_head() -> None:
    counts, waits = _compare_defaults("jetspec")
    assert counts.skipping > 1 and not waits, (counts, waits)


def check_defaults_of_a_bidirectional_block_head() -> None:
    counts, waits = _compare_defaults("ddtree")
    assert counts.skipping > 1 and not waits, (counts, waits)


def check_defaults_of_ngram_trees() -> None:
    _, waits = _compare_defaults("ngram_tree")
    assert not waits, waits


def check_ngram_trees_of_a_fixed_budget() -> None:
    _, waits = _compare_defaults("ngram_tree", budget=10)
    assert not waits, waits


def check_fixed_budgets_reserve_no_more_rows() -> None:
    """vLLM reserves the most that any request may have, before it knows what each gets."""
    made = engines(ahead=True, budget=2, nodes=6)
    scheduler = core_of(made.tree).scheduler
    steps: list[int] = []
    stock = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        steps.extend(output.num_scheduled_tokens.values())
        return output

    with patch.object(scheduler, "schedule", schedule):
        made.compare([PROMPTS[0]], greedy(max_tokens=16))
        assert set(steps[4:]) == {3}, steps
        steps.clear()
        asking = greedy(max_tokens=16, extra_args={"specplug_tree_budget": 4})
        made.compare([PROMPTS[0]], asking)
    assert set(steps[4:]) == {5}, steps


def check_defaults_of_a_scheduler_that_waits() -> None:
    """The control: it is told of every tree, and reads each step."""
    counts, waits = _compare_defaults("jetspec", ahead=False)
    assert counts.skipping > 1 and waits > 3, (counts, waits)


def check_acceptance_is_that_of_trees_made_on_the_host() -> None:
    """Tokens per draft of every path, with the same trees but for what is learnt a step late."""
    on_device = {method: _compare_defaults(method, budget=10)[0] for method in BOTH}
    with (
        patch.object(BlockHeadDrafter, "drafts_on_device", False),
        patch.object(NgramTreeDrafter, "drafts_on_device", False),
    ):
        for method, counts in on_device.items():
            of_host, waits = _compare_defaults(method, budget=10)
            assert waits > 3
            ours, theirs = (c.accepted / c.drafts for c in (counts, of_host))
            assert abs(ours - theirs) <= 0.1 * theirs, (method, counts, of_host)


def check_fp8_caches_with_scales() -> None:
    """A checkpoint that asks for such a cache, with scales far from 1; queries are quantised
    where vLLM quantises them."""
    target = {"model": str(number_formats.scaled_target()), "skip_tokenizer_init": True}
    made = engines(ahead=True, target=target)
    layers = made.runner.state.layers
    assert {c.dtype for c in made.runner.state.target_caches().values()} == {torch.uint8}
    counts = compare_windows(made)
    assert counts.skipping > 1, counts
    impl = next(iter(layers.values())).impl
    backend = made.runner.tree_backend
    stock = type(impl).cache_scales

    def without(which: str) -> Any:
        def cache_scales(self: Any, layer: Any) -> dict[str, Any]:
            scales = stock(self, layer)
            return {**scales, which: torch.ones_like(scales[which])}

        return patch.object(type(impl), "cache_scales", cache_scales)

    controls = {
        "keys": without("key_scales"),
        "values": without("value_scales"),
        "compaction": patch.object(backend, "compact", lambda *args: None),
    }
    assert not [name for name, control in controls.items() if is_equal(made, control)]


def check_fp8_caches_in_groups() -> None:
    """gpt-oss over such a cache: windows of 16 and full attention in KV cache groups of their
    own."""
    cuda_device.need_experts()
    made = engines(ahead=False, target={**engine_of("GptOss"), "kv_cache_dtype": "fp8"})
    assert len(made.runner.kv_cache_config.kv_cache_groups) == 2
    assert {c.dtype for c in made.runner.state.target_caches().values()} == {torch.uint8}
    if cuda_device.ON_GPU:
        # There vLLM quantises queries, and then weights by tiles of its own, too.
        made.compare_up_to_ties(WINDOW_PROMPTS, 20, margin=0.25)
    else:
        assert compare_windows(made).skipping > 1
