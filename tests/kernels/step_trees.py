# SPDX-License-Identifier: Apache-2.0
"""Random trees and states of a step, and what compares kernels with tensor code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.tree_problem import random_parents
from tests.unit.vllm_v2.steps import input_batch
from vllm_specplug.tree import step_trees
from vllm_specplug.tree.step_trees import (
    StepTrees,
    TreeStore,
    attach_trees,
)
from vllm_specplug.vllm_v2.step_input import step_rows

CPU, SLOTS = torch.device("cpu"), 7

UseKernels = Callable[[bool], None]


def switch(monkeypatch: pytest.MonkeyPatch) -> UseKernels:
    """Says whether kernels serve from here on."""
    return lambda on: monkeypatch.setattr(step_trees, "has_kernels", lambda device: on)


def same(one: Any, other: Any) -> None:
    """Tensors of equal values, shapes and types."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype and a.is_contiguous() == b.is_contiguous()
        assert torch.equal(a, b), (a, b)


def compared(use: UseKernels, make: Callable[[], Any]) -> Any:
    """What `make` returns with kernels: the tensors that it returns without."""
    use(False)
    expected = make()
    use(True)
    made = make()
    same(made, expected)
    return made


@dataclass
class Drafted:
    """Trees of R requests, of which some break rules, and a step that verifies them."""

    vocab: int
    # [R]
    slots: torch.Tensor
    roots: torch.Tensor
    counts: torch.Tensor
    # [R, N]
    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    # The step: tokens before each root, drafts and rows before the root.
    contexts: list[int]
    scheduled: list[int]
    prompts: list[int]
    # [R] most nodes of each that are kept
    room: torch.Tensor | None = None

    @classmethod
    def draw(cls, nodes: int, seed: int) -> Drafted:
        """The first are chains as long as can be, every third breaks rules."""
        rng = np.random.default_rng(seed)
        num_reqs, vocab = int(rng.integers(1, 6)), int(rng.choice([2, 6, 500]))
        likely = [0.0, 1.0, 0.0] if seed == 0 else [0.2, 0.4, 0.4]
        counts = rng.choice([0, nodes, rng.integers(nodes + 1)], num_reqs, p=likely)
        shape = (num_reqs, nodes)
        # Past the counts anything.
        tokens, parents = (rng.integers(-9, vocab + 9, shape) for _ in range(2))
        for r, count in enumerate(counts):
            line = random_parents(int(count), rng)
            if seed == 0 or rng.random() < 0.3:
                line = np.arange(-1, count - 1)
            for node in range(count):
                taken = {*tokens[r, :node][line[:node] == line[node]].tolist()}
                free = [t for t in range(vocab) if t not in taken]
                tokens[r, node] = rng.choice(free or [0])
            parents[r, :count] = line
        if seed % 3 == 2:
            hit = rng.random(shape) < 0.1
            tokens = np.where(hit, rng.choice([-1, vocab, vocab - 1, 2**40], shape), tokens)
            hit = rng.random(shape) < 0.1
            parents = np.where(hit, rng.integers(-4, nodes + 3, shape), parents)
        contexts = rng.integers(0, 90, num_reqs)
        # Some slots hold another request's tree, or none.
        roots = np.where(rng.random(num_reqs) < 0.2 * (seed > 0), rng.choice([-1, 91]), contexts)
        return cls(
            vocab, torch.from_numpy(rng.permutation(7)[:num_reqs]),
            torch.from_numpy(roots).int(), torch.from_numpy(counts).int(),
            torch.from_numpy(tokens), torch.from_numpy(parents).int(), torch.rand(shape),
            contexts.tolist(),
            rng.choice([0, nodes, rng.integers(nodes + 1)], num_reqs, p=likely).tolist(),
            rng.choice([0, 3, 700], num_reqs, p=[0.6, 0.3, 0.1]).tolist(),
        )  # fmt: skip

    def put(self) -> tuple[TreeStore, torch.Tensor]:
        store = TreeStore(7, self.tokens.shape[1], self.vocab, CPU)
        drafted = (self.tokens, self.parents, self.counts, self.scores, self.room)
        ids = store.put(self.slots, self.roots, *drafted)
        return store, ids

    def step(self) -> tuple[StepTrees, torch.Tensor, Any]:
        """The attached trees, the tokens of their rows and vLLM's batch."""
        store, ids = self.put()
        batch = input_batch(self.slots.tolist(), self.contexts, self.scheduled, self.prompts)
        tokens = [torch.cat([torch.zeros(1).long(), t[:n]])
                  for t, n in zip(ids, self.scheduled, strict=True)]  # fmt: skip
        return attach_trees(store, step_rows(batch, ids.shape[1])), torch.cat(tokens).int(), batch


def numbers(
    rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 2**31 - 1, shape)).to(dtype)


def request_states(rng: np.random.Generator, longest: int) -> Any:
    """vLLM's states of all slots; the tokens are a part of a wider table."""
    totals = rng.integers(1, longest + 1, SLOTS)
    tokens = numbers(rng, SLOTS, longest + 5)[:, 2 : longest + 2]
    gpu = lambda tensor: SimpleNamespace(gpu=tensor)  # noqa: E731
    return SimpleNamespace(
        total_len=gpu(torch.from_numpy(totals).int()),
        num_computed_tokens=gpu(numbers(rng, SLOTS)),
        all_token_ids=gpu(tokens),
        last_sampled_tokens=numbers(rng, SLOTS, 1, dtype=torch.int64),
    )
