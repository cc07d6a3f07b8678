# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines on trees as on CUDA, for tests in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

# Before vLLM: it puts Triton's interpreter in place.
from tests.e2e.cuda import cuda_device  # isort: skip

import pytest
import torch
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Counts, Pair, changed, core_of, pair
from tests.e2e.requests import greedy, seeded
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.vllm_v2 import host_step
from vllm_specplug.vllm_v2.host_step import HostCopy
from vllm_specplug.vllm_v2.runner import TreeOutput

# In Triton's interpreter; `cuda_on_gpu` runs the same tests on a GPU.
INTERPRETED = [
    pytest.mark.e2e,
    pytest.mark.own_process(fresh=True, env={"SPECPLUG_INTERPRETED": "1"}, timeout_s=1800),
    pytest.mark.usefixtures("cuda_worker"),
]
# One is longer than a step, so that its pieces come beside requests that decode.
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], list(range(20, 60)), [9, 9, 9]]
# Around gpt-oss' window, and longer than a block.
WINDOW_PROMPTS = [[(5 * i + n) % 250 + 5 for i in range(n)] for n in (13, 24, 40)]


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


@contextmanager
def outputs_are_final() -> Iterator[None]:
    """Raises if a later step writes to the outputs of a step, which a stream of vLLM's copies to
    the host while later steps run."""
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    stock = AsyncOutput.__init__

    def kept(
        self: AsyncOutput, *, sampler_output: Any, num_sampled_tokens: Any, **more: Any
    ) -> None:
        stock(self, sampler_output=sampler_output, num_sampled_tokens=num_sampled_tokens, **more)
        tensors = [sampler_output.sampled_token_ids, num_sampled_tokens]
        if sampler_output.logprobs_tensors is not None:
            tensors.append(sampler_output.logprobs_tensors.logprobs)
        copied.extend((tensor, tensor.clone()) for tensor in tensors)

    with patch.object(AsyncOutput, "__init__", kept):
        yield
    assert copied
    assert all(torch.equal(tensor, copy) for tensor, copy in copied)


def compare(made: Pair, ahead: bool) -> Counts:
    params = [
        greedy(max_tokens=10, logprobs=2),
        seeded(1, max_tokens=12),
        seeded(2, max_tokens=8, logprobs=2),
    ]
    with outputs_are_final():
        _, counts = made.compare(PROMPTS, params)
    assert (counts.stale > 0) == ahead, counts
    return counts


def compare_windows(made: Pair) -> Counts:
    params = [
        greedy(max_tokens=20, detokenize=False),
        *(seeded(i, max_tokens=20, detokenize=False) for i in (1, 2)),
    ]
    return made.compare(WINDOW_PROMPTS, params)[1]


def is_equal(made: Pair, control: Any) -> bool:
    """Whether outputs are those of plain vLLM in spite of a control."""
    with control:
        try:
            compare_windows(made)
        except AssertionError as error:
            return "differs" not in str(error)
        return True


@contextmanager
def knowing_candidates(
    drafter: Any = BlockHeadDrafter, method: str = "draft_candidates"
) -> Iterator[list[int]]:
    """The forward of a head that drafts all depths at once is run, and its candidates are the
    tokens that follow in any of the oracle's sequences; yields how many requests of each draft had
    their tokens on the host."""
    original, seen = getattr(drafter, method), []

    def candidates(self: Any, requests: Any, depth: int, width: int) -> Any:
        ids, log_probs, *hidden = original(self, requests, depth, width)
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
        return ids, falling.expand(log_probs.shape).contiguous(), *hidden

    with patch.object(drafter, method, candidates):
        yield seen


def compare_block_head(
    method: str, ahead: bool, ngram_topk: int, head: dict[str, str] | None = None
) -> list[int]:
    with knowing_candidates() as seen:
        made = engines(method, ahead=ahead, ngram_topk=ngram_topk, nodes=10, head=head)
        seen.clear()
        assert compare(made, ahead).skipping > 1
    return seen


class LateCopy(HostCopy):
    """A copy that comes when five more were asked for, two steps later, as from a device that the
    host runs ahead of."""

    made = 0
    waits = 0
    # While a step's output is read, which comes after the trees that the step verified.
    with_output = False

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.clone())
        LateCopy.made += 1
        self.number = LateCopy.made
        self.was_waited_for = False

    @property
    def has_arrived(self) -> bool:
        return self.was_waited_for or LateCopy.made - self.number >= 5

    def read(self) -> torch.Tensor:
        if not self.has_arrived and not LateCopy.with_output:
            LateCopy.waits += 1
            self.was_waited_for = True
        return super().read()


@contextmanager
def late_copies() -> Iterator[None]:
    """Whoever reads what has not come waits, and is counted."""

    def get_output(stock: Any, output: Any) -> Any:
        LateCopy.with_output = True
        try:
            return stock(output)
        finally:
            LateCopy.with_output = False

    copies = patch.object(host_step, "HostCopy", LateCopy)
    with copies, changed(TreeOutput, "get_output", get_output):
        yield
