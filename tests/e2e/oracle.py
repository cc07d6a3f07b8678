# SPDX-License-Identifier: Apache-2.0
"""A drafter that knows the answers, for tests: trees that are often right and never a chain.

It is given complete sequences (prompt and plain output) beforehand. Its trees hold the true
continuation up to a random depth among decoys that come first, so that accepted paths skip
nodes and compaction has work. Everything else on the way is the code that serves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from vllm_specplug.drafting.caches import DraftCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.drafter import Drafter, TargetWeights
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.tree import DraftTree

MAX_BRANCHES = 3


class OracleDrafter(Drafter):
    """Drafts from `sequences`."""

    sequences: ClassVar[list[list[int]]] = []
    decoys_from_answer: ClassVar[bool] = False
    """Whether decoys are tokens of the answer at other depths, which are often likely ones."""

    decoy: ClassVar[int | None] = None
    """What is drafted wherever a wrong token is; any, if None."""

    def load(self, target: TargetWeights) -> None:
        self.vocab_size = int(target.text_config.vocab_size)  # type: ignore[attr-defined]

    def cache_specs(self) -> list[DraftCacheSpec]:
        return []

    def observe(self, committed: CommittedTokens) -> None:
        pass

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        return [
            self._tree(requests.token_ids[r].tolist(), budget, requests.width, depth)
            for r, (budget, depth) in enumerate(zip(requests.budgets, requests.depths, strict=True))
        ]

    def _tree(self, tokens: list[int], budget: int, width: int, depth: int) -> DraftTree:
        # hash() of integers is the same in every process.
        rng = random.Random(hash(tuple(tokens)))
        known = [s for s in self.sequences if len(s) > len(tokens) and s[: len(tokens)] == tokens]
        rng.shuffle(known)
        nodes = _Nodes(budget, width)
        for sequence in known[:MAX_BRANCHES]:
            parent = -1
            for token in sequence[len(tokens) : len(tokens) + rng.randint(1, depth)]:
                if width > 1 and rng.random() < 0.6:
                    decoy = self._wrong(rng)
                    if self.decoys_from_answer:
                        decoy = rng.choice(sequence[len(tokens) - 1 : len(tokens) + depth])
                    nodes.add(parent, decoy)
                if rng.random() < 0.1:
                    token = self._wrong(rng)
                parent = nodes.add(parent, token)
                if parent is None:
                    break
        if not nodes.tokens:
            nodes.add(-1, self._wrong(rng))
        return nodes.tree()

    def _wrong(self, rng: random.Random) -> int:
        drawn = rng.randrange(self.vocab_size)
        return drawn if self.decoy is None else self.decoy


class _Nodes:
    def __init__(self, budget: int, width: int) -> None:
        self.budget, self.width = budget, width
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []

    def add(self, parent: int, token: int) -> int | None:
        """The child of `parent` with `token`, new or old; None when there is no room."""
        children = [i for i, p in enumerate(self.parents) if p == parent]
        for child in children:
            if self.tokens[child] == token:
                return child
        if len(self.tokens) >= self.budget or len(children) >= self.width:
            return None
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        return len(self.tokens) - 1

    def tree(self) -> DraftTree:
        return DraftTree(
            np.asarray(self.tokens, np.int64),
            np.asarray(self.parents, np.int32),
            np.asarray(self.depths, np.int32),
            np.zeros(len(self.tokens), np.float32),
        )


@contextmanager
def oracle_drafts() -> Iterator[None]:
    """Tree engines built while entered draft with the oracle, whatever their method."""
    import vllm_specplug.vllm_worker.proposer as proposer

    original = proposer.get_method
    proposer.get_method = lambda name: SimpleNamespace(load_drafter=lambda plan: OracleDrafter)  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        proposer.get_method = original
