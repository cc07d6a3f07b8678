# SPDX-License-Identifier: Apache-2.0
"""A machine and texts that a budget can serve without an engine, in simulated milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from vllm_specplug.budget.adaptive_budget import AdaptiveBudget, Batch, NextStep
from vllm_specplug.budget.step_cost import Calibration
from vllm_specplug.tree import DraftTree, build_tree

DEPTH, WIDTH, NODES = 7, 6, 32
# Shares of the tokens a drafter ranks second and lower among those it does not rank first.
_LOWER = 0.75 * np.array([0.45, 0.22, 0.13, 0.11, 0.09])
_DRAFTS = 300

# Flat to some rows, then steeper: a small model on one core.
ROWS = (1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
TIMES = (46.0, 48.0, 51.0, 57.0, 69.0, 97.0, 153.0, 265.0)


@dataclass(frozen=True)
class Machine:
    """What steps really cost, milliseconds."""

    rows: Sequence[float] = ROWS
    times: Sequence[float] = TIMES
    """Target forward and logits of so many rows."""
    draft_ms: float = 6.0
    draft_row_ms: float = 0.33
    rest_ms: float = 3.0
    prompt_ms: float = 100.0
    noise: float = 0.02
    """Standard deviation of the log of a step's time."""

    def verify_ms(self, rows: int) -> float:
        return float(np.interp(rows, self.rows, self.times))

    def drafting_ms(self, rows: int) -> float:
        return self.draft_ms + self.draft_row_ms * rows if rows else 0.0

    def calibration(self, error: Sequence[float] = ()) -> Calibration:
        """What a measurement at start finds, `error` times too long at each of `rows`."""
        times = np.asarray(self.times) * np.asarray(error or (1.0,) * len(self.rows))
        return Calibration(
            rows=tuple(self.rows),
            forward_ms=tuple(0.9 * times),
            logits_ms=tuple(0.1 * times),
            context_ms=0.0,
            attention_ms=0.0,
            draft_rows=(2.0, 8.0),
            draft_ms=(self.drafting_ms(2), self.drafting_ms(8)),
        )


# An 8B target on an H100, products by rows: bench/results/gpu_speed.md.
H100 = Machine(
    rows=(1.0, 16.0, 64.0, 128.0, 192.0, 256.0, 384.0, 512.0, 768.0, 1024.0),
    times=(6.4, 6.4, 6.5, 6.6, 7.0, 7.4, 9.3, 11.8, 16.9, 23.1),
    draft_ms=1.7, draft_row_ms=0.005, rest_ms=0.3, prompt_ms=14.0,
)  # fmt: skip


@lru_cache
def drafts(tenths: int) -> list[tuple[DraftTree, list[int | None]]]:
    """Trees and the tokens that really follow, None from where no candidate is right on.

    `tenths` is how often, in tenths, the best candidate of the first depth is right on average.
    Scores are too sure of themselves where drafts are bad.
    """
    rng = np.random.default_rng(tenths)
    tokens = 10 * np.arange(DEPTH)[:, None] + np.arange(WIDTH)
    found = []
    for _ in range(_DRAFTS):
        level = np.clip(tenths / 10 + 0.25 * rng.standard_normal(), 0.05, 0.98)
        first = level * 0.97 ** np.arange(DEPTH) + 0.15 * rng.standard_normal(DEPTH)
        shares = np.empty((DEPTH, WIDTH))
        shares[:, 0] = np.clip(first, 0.03, 0.99)
        shares[:, 1:] = (1.0 - shares[:, :1]) * _LOWER
        claimed = shares**0.85
        claimed /= np.maximum(claimed.sum(axis=1, keepdims=True) / 0.95, 1.0)
        claimed = -np.sort(-claimed, axis=1)
        tree = build_tree(tokens, np.log(claimed), NODES, tree_width=WIDTH, tree_depth=DEPTH)
        ranks = (shares.cumsum(axis=1) < rng.random((DEPTH, 1))).sum(axis=1)
        truth = [10 * d + int(k) if k < WIDTH else None for d, k in enumerate(ranks)]
        found.append((tree, truth))
    return found


@dataclass
class Request:
    """One answer under way."""

    name: str
    length: int
    rng: np.random.Generator
    tenths: int
    done: int = 1
    decoding_ms: float = 0.0

    @property
    def remaining(self) -> int:
        """Deepest node that can still be emitted."""
        return self.length - self.done - 1

    def draft(self) -> tuple[DraftTree, list[int | None]]:
        """The full tree of the next step and what really follows."""
        pool = drafts(self.tenths)
        tree, truth = pool[self.rng.integers(len(pool))]
        if self.remaining < DEPTH:
            tree = tree.subset(np.flatnonzero(tree.depths <= max(self.remaining, 0)).tolist())
        return tree, truth


def accepted_path(tree: DraftTree, truth: list[int | None]) -> list[int]:
    """Nodes of `tree` that lie on `truth`."""
    path: list[int] = []
    for token in truth:
        node = None if token is None else tree.child_of(path[-1] if path else -1, token)
        if node is None:
            break
        path.append(node)
    return path


@dataclass
class Server:
    """Serves with a budget: a number of nodes (0: plain decoding) or an adaptive one."""

    budget: AdaptiveBudget | int
    machine: Machine = field(default_factory=Machine)
    answer: int = 64
    """Tokens of an answer on average."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._count = 0
        self._noise = np.random.default_rng([self.seed, 1])
        self._running: list[Request] = []
        self.ended: list[tuple[float, int]] = []
        """Milliseconds of decoding, and tokens decoded, of each request that ended."""

    def serve(self, concurrency: int, milliseconds: float) -> float:
        """Keeps so many requests running for so long; returns tokens per second."""
        clock, tokens = 0.0, 0
        while clock < milliseconds:
            took, emitted = self._next(concurrency)
            clock += took
            tokens += emitted
        return 1e3 * tokens / clock

    def _next(self, concurrency: int) -> tuple[float, int]:
        """A step, and the prompts of what joins it: milliseconds and tokens."""
        clock, tokens = 0.0, 0
        while len(self._running) < concurrency:
            self._running.append(self._new_request())
            clock += self.machine.prompt_ms
            tokens += 1
        took, emitted = self._step()
        del self._running[concurrency:]  # clients that leave when the load falls
        return clock + took, tokens + emitted

    def _new_request(self) -> Request:
        self._count += 1
        rng = np.random.default_rng([self.seed, self._count])
        length = max(8, int(rng.normal(self.answer, 0.15 * self.answer)))
        tenths = int(np.clip(round(10 * rng.beta(3.2, 2.2)), 1, 9))
        return Request(f"{self.seed}-{self._count}", length, rng, tenths)

    def _step(self) -> tuple[float, int]:
        """One step of all that run: milliseconds and tokens."""
        running, machine, budget = self._running, self.machine, self.budget
        full = [request.draft() for request in running]
        names = [request.name for request in running]
        if isinstance(budget, AdaptiveBudget):
            reach = [max(0, min(DEPTH, request.remaining)) for request in running]
            step = NextStep(
                req_ids=names,
                context_lens=[200] * len(running),
                caps=[NODES] * len(running),
                forward_limits=reach,
                fixed=[False] * len(running),
                batch=Batch(len(running), 200 * len(running)),
            )
            plan = budget.plan(step, [DraftTree.empty()] * len(running))
            depths = plan.depths.tolist()
            trees = budget.trim(
                plan,
                [
                    tree.subset(np.flatnonzero(tree.depths <= depth).tolist())
                    for (tree, _), depth in zip(full, depths, strict=True)
                ],
            )
        else:
            trees = [tree.prefix(min(budget, tree.num_nodes)) for tree, _ in full]
            depths = [min(DEPTH, max(0, r.remaining)) if budget else 0 for r in running]
        paths = [accepted_path(t, truth) for t, (_, truth) in zip(trees, full, strict=True)]
        rows = len(running) + sum(tree.num_nodes for tree in trees)
        has_trees = rows > len(running)
        noise = float(np.exp(machine.noise * self._noise.standard_normal()))
        verify_ms = noise * machine.verify_ms(rows)
        draft_rows = sum(depth + 1 for depth in depths if depth)
        draft_ms = machine.drafting_ms(draft_rows)
        if isinstance(budget, AdaptiveBudget):
            if draft_rows:
                budget.costs.draft.observe(draft_rows, draft_ms)
            budget.costs.observe_verify(rows, rows, 0, verify_ms, has_trees=has_trees)
            budget.costs.observe_rest(machine.rest_ms, has_trees=has_trees)
            seen = [x for x in zip(names, trees, paths, strict=True) if x[1].num_nodes]
            if seen:
                budget.observe(*zip(*seen, strict=True))
        took_ms = verify_ms + draft_ms + machine.rest_ms
        for request, path in zip(running, paths, strict=True):
            request.done += 1 + len(path)
            request.decoding_ms += took_ms
            if request.remaining < 0:
                self.ended.append((request.decoding_ms, request.done - 1))
        ended = [request.name for request in running if request.remaining < 0]
        if isinstance(budget, AdaptiveBudget):
            budget.forget(ended)
        self._running = [request for request in running if request.name not in ended]
        tokens = len(names) + sum(map(len, paths))
        return took_ms, tokens
