# SPDX-License-Identifier: Apache-2.0
"""A machine and texts that a budget can serve without an engine, in simulated milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from vllm_specplug.budget import AdaptiveBudget, Calibration, NextStep
from vllm_specplug.tree import DraftTree, build_tree, merge_trees

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
    rest_request_ms: float = 0.0
    """Of the rest of a step, for each request."""
    prompt_ms: float = 100.0
    prompt_tokens: int = 200
    context_ms: float = 0.0
    """A head reading one more token of context."""
    context_call_ms: float = 0.0
    """A head reading any, in steps without a draft; a draft's time has it in it."""
    tree_share: float = 0.0
    """What verifying takes longer, as a share, where there are trees among the rows."""
    tree_rest_ms: float = 0.0
    """What the rest of a step takes longer where there are trees."""
    noise: float = 0.02
    """Standard deviation of the log of a step's time."""

    def verify_ms(self, rows: int, *, has_trees: bool = False) -> float:
        plain = float(np.interp(rows, self.rows, self.times))
        return plain * (1.0 + self.tree_share * has_trees)

    def drafting_ms(self, rows: int) -> float:
        return self.draft_ms + self.draft_row_ms * rows if rows else 0.0

    def all_rest_ms(self, requests: int, *, has_trees: bool = False) -> float:
        return self.rest_ms + self.rest_request_ms * requests + self.tree_rest_ms * has_trees

    def plain_ms(self, requests: int) -> float:
        """A step of plain decoding."""
        return self.verify_ms(requests) + self.all_rest_ms(requests)

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
        tree = build_tree(
            "best_first", tokens, np.log(claimed), NODES, tree_width=WIDTH, tree_depth=DEPTH
        )
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
    due: float = 0.0
    """Tokens that plain decoding would have given meanwhile."""
    waiting: int = 0
    """Tokens of its context that the head has not read."""

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

    def lookup(self, truth: list[int | None], right: float) -> DraftTree:
        """A branch of the text that recurs; each of its tokens is right so often, and claimed to be
        somewhat more often."""
        tokens, scores = [], []
        for depth, token in enumerate(truth[: max(0, self.remaining)]):
            is_right = self.rng.random() < right and token is not None
            # The last rank: seldom what a head drafts.
            tokens.append(token if is_right and token is not None else 10 * depth + WIDTH - 1)
            scores.append((depth + 1) * np.log(min(0.95, right + 0.05)))
        return DraftTree.chain(tokens, np.asarray(scores, np.float32))


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
    shift: int = 0
    """Added to `tenths` of all texts from now on."""
    lookups: float = 0.0
    """Share of the steps of a request in which its text recurs."""
    waits: bool = True
    """Whether the context of a request without drafts is read when it drafts, not at once."""
    tells_debts: bool = True

    def __post_init__(self) -> None:
        self._count = 0
        self._noise = np.random.default_rng([self.seed, 1])
        self._running: list[Request] = []
        self.ended: list[tuple[float, int]] = []
        """Milliseconds of decoding, and tokens decoded, of each request that ended."""
        self.paces: list[float] = []
        """Tokens of each request that ended over those of plain decoding in the same time."""

    def serve(self, concurrency: int, milliseconds: float) -> float:
        """Keeps so many requests running for so long; returns tokens per second."""
        clock, tokens = 0.0, 0
        while clock < milliseconds:
            took, emitted = self._next(concurrency)
            clock += took
            tokens += emitted
        return 1e3 * tokens / clock

    def answer_requests(self, concurrency: int, count: int) -> float:
        """Keeps so many requests running until `count` more have ended; returns tokens per
        second."""
        clock, tokens, last = 0.0, 0, len(self.ended) + count
        while len(self.ended) < last:
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
        tenths = int(np.clip(round(10 * rng.beta(3.2, 2.2)) + self.shift, 1, 9))
        return Request(
            f"{self.seed}-{self._count}", length, rng, tenths, waiting=self.machine.prompt_tokens
        )

    def _step(self) -> tuple[float, int]:
        """One step of all that run: milliseconds and tokens."""
        running, machine, budget = self._running, self.machine, self.budget
        full = [request.draft() for request in running]
        found = [DraftTree.empty()] * len(running)
        if self.lookups:
            found = [
                request.lookup(truth, 0.45 + 0.05 * request.tenths)
                if request.rng.random() < self.lookups
                else DraftTree.empty()
                for request, (_, truth) in zip(running, full, strict=True)
            ]
        names = [request.name for request in running]
        if isinstance(budget, AdaptiveBudget):
            reach = [max(0, min(DEPTH, request.remaining)) for request in running]
            debts = [machine.context_ms * request.waiting for request in running]
            step = NextStep(
                req_ids=names,
                context_lens=[200] * len(running),
                caps=[NODES] * len(running),
                forward_limits=reach,
                fixed=[False] * len(running),
                num_roots=len(running),
                root_context=200 * len(running),
                debts=debts if self.waits and self.tells_debts and machine.context_ms else (),
            )
            depths = budget.plan(step, found)
            trees = budget.trim(
                [
                    _both(tree.subset(np.flatnonzero(tree.depths <= depth).tolist()), looked_up)
                    for (tree, _), looked_up, depth in zip(full, found, depths, strict=True)
                ]
            )
        else:
            trees = [tree.prefix(min(budget, tree.num_nodes)) for tree, _ in full]
            depths = [min(DEPTH, max(0, r.remaining)) if budget else 0 for r in running]
        paths = [accepted_path(t, truth) for t, (_, truth) in zip(trees, full, strict=True)]
        rows = len(running) + sum(tree.num_nodes for tree in trees)
        has_trees = rows > len(running)
        rest_ms = machine.all_rest_ms(len(running), has_trees=has_trees)
        verify_ms = machine.verify_ms(rows, has_trees=has_trees) * float(
            np.exp(machine.noise * self._noise.standard_normal())
        )
        draft_rows = sum(depth + 1 for depth in depths if depth)
        draft_ms = machine.drafting_ms(draft_rows)
        context_ms = self._read_contexts(depths, paths)
        if isinstance(budget, AdaptiveBudget):
            if draft_rows:
                budget.costs.draft.observe(draft_rows, draft_ms)
            budget.costs.observe_verify(rows, rows, 0, verify_ms, has_trees=has_trees)
            budget.costs.observe_rest(rest_ms, has_trees=has_trees)
            seen = [x for x in zip(names, trees, paths, strict=True) if x[1].num_nodes]
            if seen:
                budget.observe(*zip(*seen, strict=True))
        took_ms = verify_ms + draft_ms + rest_ms + context_ms
        for request, path in zip(running, paths, strict=True):
            request.done += 1 + len(path)
            request.decoding_ms += took_ms
            request.due += took_ms / machine.plain_ms(len(running))
            if request.remaining < 0:
                self.ended.append((request.decoding_ms, request.done - 1))
                self.paces.append((request.done - 1) / request.due)
        ended = [request.name for request in running if request.remaining < 0]
        if isinstance(budget, AdaptiveBudget):
            budget.forget(ended)
        self._running = [request for request in running if request.name not in ended]
        tokens = len(names) + sum(map(len, paths))
        return took_ms, tokens

    def _read_contexts(self, depths: Sequence[int], paths: Sequence[Sequence[int]]) -> float:
        """Milliseconds of the head for the contexts it reads beside a step, plain decoding none."""
        if not isinstance(self.budget, AdaptiveBudget):
            return 0.0
        read = 0
        for request, depth, path in zip(self._running, depths, paths, strict=True):
            if depth or not self.waits:
                read, request.waiting = read + request.waiting, 0
            request.waiting += 1 + len(path)
        calls = bool(read) and not any(depths)
        return self.machine.context_ms * read + self.machine.context_call_ms * calls


def _both(tree: DraftTree, found: DraftTree) -> DraftTree:
    """The union of what was drafted and what was looked up."""
    return merge_trees([tree, found], NODES) if len(found) else tree
